"""Serve deployment: latents in, PNG, JPEG, WebP or MP4 bytes out."""

from __future__ import annotations

import logging
import threading
import time

from deployments.observability.logs import request_context
from deployments.stages.common import Decoded, StageSpec, load_stage
from deployments.studio.interface import Output
from engines.core.parcel import Parcel
from pipelines.media import encode_frames, encode_thumbnail
from pipelines.request import MediaRequest

logger = logging.getLogger(__name__)


class VaeDecoder:
    """Decodes finished jobs and previews of running ones, one after the other.

    Serve calls from a pool of threads, and a clip's VAE keeps the frames before in the module: hence the lock.
    """

    def __init__(self, spec: StageSpec) -> None:
        self._one_at_a_time = threading.Lock()
        self._decoder = load_stage(spec).decoder()

    def decode(self, latents: Parcel, request: MediaRequest, output: Output) -> Decoded:
        """Returns the finished bytes."""
        started_s = time.perf_counter()
        with request_context(request.request_id):
            with self._one_at_a_time:
                frames = self._decoder.decode(latents.open(), request)
            data = encode_frames(frames, output.format, compression=output.compression, fps=request.fps)
            thumbnail = encode_thumbnail(frames[0]) if request.kind == "video" else b""
            decode_s = time.perf_counter() - started_s
            logger.info("latents are decoded", extra={"decode_s": round(decode_s, 4), "num_bytes": len(data)})
        return Decoded(data=data, thumbnail=thumbnail, decode_s=decode_s)

    def preview(self, latents: Parcel, request: MediaRequest) -> bytes:
        """Returns PNG bytes of the first frame of unfinished ``latents``."""
        with request_context(request.request_id):
            with self._one_at_a_time:
                frames = self._decoder.preview(latents.open(), request)
            preview: bytes = encode_frames(frames[:1], "png")
        return preview
