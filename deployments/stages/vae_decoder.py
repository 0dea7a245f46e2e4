"""Serve deployment: latents in, PNG, JPEG, WebP or MP4 bytes out."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.config import ProvenanceConfig
from deployments.names import own_version
from deployments.observability.logs import request_context
from deployments.service.interface import Output
from deployments.stages.common import (
    Decoded,
    StageSpec,
    StageWeights,
    WeightStage,
    Workers,
    load_stage,
    refusal,
    use_device,
)
from deployments.stages.devices import stage_devices
from deployments.stages.kernel_cache import stage_kernels
from deployments.stages.measured_times import decode_key, decode_times_of
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.warm_up import outputs, warm_decoder
from engines.core.logs import timed
from engines.core.parcel import Parcel
from pipelines.directory import part_class
from pipelines.libraries import quick_imports
from pipelines.media.encode import MAX_GROUPS, encode_frames, encode_thumbnail
from pipelines.media.metadata import NO_TEXTS, MetadataWriter, Texts
from pipelines.media.sound import Sound
from pipelines.request import InputSound, MediaRequest
from pipelines.schedules import SCHEDULER

if TYPE_CHECKING:
    from pipelines.blocks.decoder import BlocksDecoder
    from pipelines.media.clip import ClipEncoder
    from pipelines.media.provenance import ManifestWriter


NUM_ENCODINGS = 4
"""Pictures or clips that are encoded to files concurrently, during one decode."""

logger = logging.getLogger(__name__)


class ClipFinisher:
    """Decodes with the threads ``decoding``, finishes files with ``writing``, and encodes in a third pool.

    Threads that wait for groups must not block those that encode them. Frames are pixels until their group is encoded.
    If encoding is slower, decoding waits once each thread has one group and one queued.
    """

    def __init__(self, decoder: BlocksDecoder, decoding: Workers, writing: Workers) -> None:
        self._decoder, self._decoding, self._writing = decoder, decoding, writing
        self._num_threads = min(MAX_GROUPS, os.cpu_count() or 1)
        self._groups = ThreadPoolExecutor(self._num_threads, thread_name_prefix="groups")

    def finish(
        self, latents: Parcel, request: MediaRequest, texts: Texts = NO_TEXTS, copied: Sound | None = None
    ) -> tuple[bytes, bytes]:
        """Return the clip, with metadata ``texts``, and a thumbnail of its first frame.

        A clip without a sound of its own has the one that is ``copied``.
        """
        from pipelines.media.clip import ClipEncoder  # PyAV, not needed for pictures

        with ClipEncoder(request.num_frames, request.fps, self._groups, 2 * self._num_threads) as clip:
            thumbnail, sound = self._decoding.run(self._decode, latents, request, clip)
            data = self._writing.run(clip.finish, sound or copied, texts)
        return data, thumbnail.result()

    def _decode(self, latents: Parcel, request: MediaRequest, clip: ClipEncoder) -> tuple[Future[bytes], Sound | None]:
        thumbnail, sound = None, None
        for media in self._decoder.decode_chunks(latents.open(), request):
            clip.add(media.frames_FHWC)
            thumbnail = thumbnail or self._groups.submit(encode_thumbnail, media.frames_FHWC[0])
            sound = media.sound
        assert thumbnail is not None, "a clip without frames"
        return thumbnail, sound


class VaeDecoder(WeightStage):
    """Decodes finished jobs and previews one at a time, since a clip's VAE keeps earlier frames in the module."""

    def __init__(self, spec: StageSpec, weights: StageWeights | None = None) -> None:
        """Load the decoder. ``weights``: the loaded weights of another part of the model in this process."""
        with quick_imports(), timed("decoder: weights", model=spec.model.name):
            with timed("decoder: checkpoint", model=spec.model.name):
                checkpoint = load_stage(spec)
            options = spec.model.decoder
            devices = stage_devices(spec.stage)
            _, *others = devices
            self._weights = weights or StageWeights(spec, "decoder")
            with timed("decoder: device", model=spec.model.name):
                use_device(devices[0])
            with self._weights.loading() as modules:
                self._decoder = checkpoint.decoder(
                    compiled=options.compile, memory_bytes=options.memory_bytes, others=others
                )
                modules.extend(self._decoder.modules)
        self._decoding, self._writing = Workers(1, "decoding"), Workers(NUM_ENCODINGS, "encoding")
        self._times, self._saving = decode_times_of(spec.model, checkpoint.path, devices), Workers(1, "saving")
        sampler = part_class(checkpoint.path, SCHEDULER) or ""
        self._metadata = MetadataWriter(level=spec.metadata, software=f"Troupe {own_version()}", sampler=sampler)
        self._manifests = _manifest_writer(spec.provenance)
        self._clips = ClipFinisher(self._decoder, self._decoding, self._writing)
        with timed("decoder: warm up", model=spec.model.name):
            with stage_kernels(spec.model, "decoder", devices[0]):
                frames_FHWC = self._decoding.run(warm_decoder, self._decoder, spec, checkpoint)
            for request, output in outputs(checkpoint.defaults):
                self._writing.run(self._write, frames_FHWC, request, output)
        self._weights.loaded()

    def expected_s(self, request: MediaRequest, output: Output) -> float | Exception | None:
        """Return the predicted decode time, None before a similar decode on this hardware. Never waits.

        If the request certainly cannot be decoded here, return the error that says so.
        """
        try:
            self._decoder.check_fits(request)
        except ValueError as error:
            return refusal(error, request_id=request.request_id)
        return self._times.scaled_s(decode_key(request, output))

    def decode(self, latents: Parcel, request: MediaRequest, output: Output) -> Decoded:
        """Return the finished bytes."""
        start_s = time.perf_counter()
        with request_context(request.request_id), self._weights.work():
            files, thumbnail = self._finish(latents, request, output)
            decode_s = time.perf_counter() - start_s
            num_bytes = sum(map(len, files))
            logger.info("latents are decoded", extra={"decode_s": round(decode_s, 4), "num_bytes": num_bytes})
        if self._times.learn(decode_key(request, output), decode_s):
            self._saving.begin(self._times.save)
        return Decoded(data=files[0], further=files[1:], thumbnail=thumbnail, decode_s=decode_s)

    def preview(self, latents: Parcel, request: MediaRequest) -> bytes:
        """Return PNG bytes of the first frame of unfinished ``latents``."""
        with request_context(request.request_id), self._weights.work():
            frames = self._decoding.run(lambda: self._decoder.preview(latents.open(), request))
            return self._writing.run(encode_frames, frames[:1], "png")

    def _finish(self, latents: Parcel, request: MediaRequest, output: Output) -> tuple[tuple[bytes, ...], bytes]:
        if output.format == "mp4":
            texts = self._metadata.texts(request)
            data, thumbnail = self._clips.finish(latents, request, texts, _copied(output.sound, request))
            return (self._writing.run(self._sign, data, request, output),), thumbnail
        media = self._decoding.run(lambda: self._decoder.decode_all(latents.open(), request))
        return self._writing.run(self._write, media.frames_FHWC, request, output)

    def _write(
        self, frames_FHWC: NDArray[np.uint8], request: MediaRequest, output: Output
    ) -> tuple[tuple[bytes, ...], bytes]:
        """Return a clip and its thumbnail, or a picture's layers, each a file."""
        if request.kind == "video":
            texts, thumbnail = self._metadata.texts(request), encode_thumbnail(frames_FHWC[0])
            data = encode_frames(frames_FHWC, output.format, fps=request.fps, texts=texts)
            return (self._sign(data, request, output),), thumbnail
        layers = enumerate(np.split(frames_FHWC, len(frames_FHWC)))
        return tuple(self._write_layer(layer_FHWC, request, output, index) for index, layer_FHWC in layers), b""

    def _write_layer(self, layer_FHWC: NDArray[np.uint8], request: MediaRequest, output: Output, index: int) -> bytes:
        texts = self._metadata.texts(request, index if request.num_layers else None)
        data = encode_frames(layer_FHWC, output.format, compression=output.compression, texts=texts)
        return self._sign(data, request, output)

    def _sign(self, data: bytes, request: MediaRequest, output: Output) -> bytes:
        return data if self._manifests is None else self._manifests.sign_for(request, data, output.format)


def _copied(sound: InputSound | None, request: MediaRequest) -> Sound | None:
    """Return ``sound``, no longer than the clip of ``request``."""
    if sound is None:
        return None
    samples_CT = np.frombuffer(sound.data, np.float32).reshape(sound.num_channels, -1)
    num_samples = round(request.num_frames / request.fps * sound.rate)
    return Sound(samples_CT=samples_CT[:, :num_samples], rate=sound.rate)


def _manifest_writer(provenance: ProvenanceConfig | None) -> ManifestWriter | None:
    if provenance is None:
        return None
    from pipelines.media.provenance import Credentials, ManifestWriter  # the extra `provenance`

    credentials = Credentials.read(provenance.certificate, provenance.key)
    return ManifestWriter(credentials, "Troupe", own_version())


class Codec(PromptEncoder, VaeDecoder):
    """Text encoder and decoder in one process, for small models: a process costs more than their weights."""

    def __init__(self, spec: StageSpec) -> None:
        PromptEncoder.__init__(self, spec, is_whole=False)
        VaeDecoder.__init__(self, spec, self._weights)
