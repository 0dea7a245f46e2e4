"""Serve deployment: latents in, PNG, JPEG, WebP or MP4 bytes out."""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from deployments.observability.logs import request_context
from deployments.stages.clip_finishing import ClipFinisher
from deployments.stages.common import Decoded, StageSpec, load_stage
from deployments.stages.devices import stage_devices
from deployments.stages.measured_times import decode_times_of, decoded_like
from deployments.stages.warm_up import outputs, warm_decoder
from deployments.stages.workers import Workers
from deployments.studio.interface import Output
from engines.core.transport.parcel import Parcel
from pipelines.libraries import quick_imports
from pipelines.media import encode_frames, encode_thumbnail
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)


NUM_ENCODINGS = 4
"""Pictures that are encoded, and clips that are put together, side by side, beside one decoding."""


class VaeDecoder:
    """Decodes finished jobs and previews of running ones, one after the other: a clip's VAE keeps the frames before in
    the module."""

    def __init__(self, spec: StageSpec) -> None:
        with quick_imports():
            checkpoint = load_stage(spec)
            options = spec.model.decoder
            devices = stage_devices(spec.stage)
            _, *others = devices
            self._decoder = checkpoint.decoder(
                compiled=options.compile, memory_bytes=options.memory_bytes, others=others
            )
        self._decoding, self._writing = Workers(1, "decoding"), Workers(NUM_ENCODINGS, "encoding")
        self._times, self._keeping = decode_times_of(spec.model, checkpoint.path, devices), Workers(1, "keeping")
        self._clips = ClipFinisher(self._decoder, self._decoding, self._writing)
        frames_FHWC = self._decoding.run(warm_decoder, self._decoder, spec, checkpoint)
        for request, output in outputs(checkpoint.defaults):
            self._writing.run(_encode, frames_FHWC, request, output)

    def expected_s(self, request: MediaRequest, output: Output) -> float | None:
        """Returns the seconds that decoding is predicted to take, None before anything like it was decoded on such a
        machine; ``ValueError`` for what certainly cannot be decoded here. It waits for no decoding."""
        self._decoder.check_fits(request)
        return self._times.scaled_s(decoded_like(request, output))

    def decode(self, latents: Parcel, request: MediaRequest, output: Output) -> Decoded:
        """Returns the finished bytes."""
        started_s = time.perf_counter()
        with request_context(request.request_id):
            files, thumbnail = self._finish(latents, request, output)
            decode_s = time.perf_counter() - started_s
            num_bytes = sum(map(len, files))
            logger.info("latents are decoded", extra={"decode_s": round(decode_s, 4), "num_bytes": num_bytes})
        if self._times.learn(decoded_like(request, output), decode_s):
            self._keeping.begin(self._times.save)
        return Decoded(data=files[0], further=files[1:], thumbnail=thumbnail, decode_s=decode_s)

    def preview(self, latents: Parcel, request: MediaRequest) -> bytes:
        """Returns PNG bytes of the first frame of unfinished ``latents``."""
        with request_context(request.request_id):
            frames = self._decoding.run(lambda: self._decoder.preview(latents.open(), request))
            return self._writing.run(encode_frames, frames[:1], "png")

    def _finish(self, latents: Parcel, request: MediaRequest, output: Output) -> tuple[tuple[bytes, ...], bytes]:
        if output.format == "mp4":
            data, thumbnail = self._clips.finish(latents, request)
            return (data,), thumbnail
        media = self._decoding.run(lambda: self._decoder.decode_all(latents.open(), request))
        return self._writing.run(_encode, media.frames_FHWC, request, output)


def _encode(frames_FHWC: NDArray[np.uint8], request: MediaRequest, output: Output) -> tuple[tuple[bytes, ...], bytes]:
    """Returns a clip and its thumbnail, or a picture's layers, each a file."""
    if request.kind == "video":
        data = encode_frames(frames_FHWC, output.format, compression=output.compression, fps=request.fps)
        return (data,), encode_thumbnail(frames_FHWC[0])
    layers = np.split(frames_FHWC, len(frames_FHWC))
    return tuple(encode_frames(layer, output.format, compression=output.compression) for layer in layers), b""
