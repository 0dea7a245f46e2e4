"""Latents to MP4: frames are encoded while later ones are decoded."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.stages.workers import Workers
from engines.core.transport.parcel import Parcel
from pipelines.media import Sound, encode_thumbnail
from pipelines.media.metadata import NO_TEXTS, Texts
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from pipelines.blocks.decoder import BlocksDecoder
    from pipelines.media.clip import ClipEncoder

MAX_THREADS = 8
"""Groups of pictures encoded concurrently. A clip has hardly more."""


class ClipFinisher:
    """Decodes with the threads ``decoding``, finishes files with ``writing``, and encodes in a third pool.

    Threads that wait for groups must not block those that encode them. Frames are held as pixels until their group is
    encoded. If encoding is slower, decoding waits once each thread has one group and one queued.
    """

    def __init__(self, decoder: BlocksDecoder, decoding: Workers, writing: Workers) -> None:
        self._decoder, self._decoding, self._writing = decoder, decoding, writing
        self._num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._groups = ThreadPoolExecutor(self._num_threads, thread_name_prefix="groups")

    def finish(self, latents: Parcel, request: MediaRequest, texts: Texts = NO_TEXTS) -> tuple[bytes, bytes]:
        """Return the clip, with metadata ``texts``, and a thumbnail of its first frame."""
        from pipelines.media.clip import ClipEncoder  # PyAV, not needed for pictures

        with ClipEncoder(request.num_frames, request.fps, self._groups, 2 * self._num_threads) as clip:
            first_HWC, sound = self._decoding.run(self._decode, latents, request, clip)
            data = self._writing.run(clip.finish, sound, texts)
        return data, self._writing.run(encode_thumbnail, first_HWC)

    def _decode(
        self, latents: Parcel, request: MediaRequest, clip: ClipEncoder
    ) -> tuple[NDArray[np.uint8], Sound | None]:
        first_HWC, sound = None, None
        for media in self._decoder.decode_chunks(latents.open(), request):
            clip.add(media.frames_FHWC)
            first_HWC = media.frames_FHWC[0].copy() if first_HWC is None else first_HWC
            sound = media.sound
        assert first_HWC is not None, "a clip without frames"
        return first_HWC, sound
