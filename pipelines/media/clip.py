"""Clips: H.264, and AAC where they have sound, in MP4, with PyAV (FFmpeg and libx264)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Self

import av
import numpy as np
from numpy.typing import NDArray

from pipelines.media.groups import CODEC, QUALITY, Packets, configure, encode_group, evenly_spaced, group_length
from pipelines.media.metadata import NO_TEXTS, Texts, tags_of
from pipelines.media.sound import Sound

SOUND_QUALITY = {"b": "192k", "flags": "+bitexact"}
CONTAINER = {"movflags": "+faststart", "fflags": "+bitexact"}
"""The index goes before the frames, so that browsers play while they load; no time stamps of the encoding."""

Frame = NDArray[np.uint8]


def encode_clip(
    frames_FHWC: NDArray[np.uint8], fps: int, sound: Sound | None = None, num_threads: int = 1, texts: Texts = NO_TEXTS
) -> bytes:
    """The bytes of a ``ClipEncoder``, from all frames at once. They are the same with any ``num_threads``."""
    with ThreadPoolExecutor(num_threads) as workers, ClipEncoder(len(frames_FHWC), fps, workers) as clip:
        clip.add(frames_FHWC)
        return clip.finish(sound, texts)


class ClipEncoder:
    """An MP4 (yuv420p, BT.709) from frames that come piece by piece. Odd sizes gain a copy of their last row or column.

    ``workers`` encode groups of pictures side by side while further frames come. The clip is cut by ``num_frames``, how
    many one expects, alone: the bytes do not depend on the workers, nor on the pieces. No more than ``max_waiting``
    groups are held as pixels: ``add`` waits for one of them. As a context it drops, at its end, what has not begun.
    """

    def __init__(self, num_frames: int, fps: int, workers: Executor, max_waiting: int = 16) -> None:
        if fps < 1:
            raise ValueError(f"{fps} frames per second: at least 1 is needed for a clip")
        self._fps, self._workers, self._length = fps, workers, group_length(num_frames)
        self._room = BoundedSemaphore(max_waiting)
        self._begun: list[Frame] = []
        self._groups: list[Future[Packets]] = []
        self._size: tuple[int, int] | None = None

    def add(self, frames_FHWC: NDArray[np.uint8]) -> None:
        """Takes the next frames, uint8 (frames, height, width, 3), which nobody changes afterwards."""
        self._size = self._size or frames_FHWC.shape[1:3]
        for frame_HWC in frames_FHWC:
            self._begun.append(frame_HWC)
            if len(self._begun) == self._length:
                self._hand_over()

    def finish(self, sound: Sound | None = None, texts: Texts = NO_TEXTS) -> bytes:
        """Returns the file, with ``texts``, once all groups are encoded, or raises what the encoder of one raised."""
        if self._begun:
            self._hand_over()
        assert self._size is not None, "a clip without frames"
        with tempfile.TemporaryDirectory() as folder:  # moving the index to the front reads the file again
            file = Path(folder) / "clip.mp4"
            with av.open(str(file), "w", options=CONTAINER) as container:
                container.metadata.update(tags_of(texts))
                _write(container, (group.result() for group in self._groups), self._size, self._fps, sound)
            return file.read_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            group.cancel()

    def _hand_over(self) -> None:
        self._room.acquire()
        first, frames_HWC = len(self._groups) * self._length, tuple(self._begun)
        self._begun.clear()
        group = self._workers.submit(encode_group, frames_HWC, first, self._fps)
        group.add_done_callback(lambda _: self._room.release())
        self._groups.append(group)


def _write(container: Any, groups: Iterable[Packets], size: tuple[int, int], fps: int, sound: Sound | None) -> None:
    stream: Any = container.add_stream(CODEC, rate=fps, options=QUALITY)
    configure(stream.codec_context, size, fps)
    sounding = () if sound is None else ((_add_sound(container, sound), _sound_frame(sound)),)
    container.start_encoding()  # for its headers: the packets come from encoders like it
    for packets in evenly_spaced(groups):
        for packet in packets:
            packet.stream = stream
        container.mux(packets)
    for track, samples in sounding:
        container.mux(track.encode(samples))
        container.mux(track.encode(None))


def _add_sound(container: Any, sound: Sound) -> Any:
    stream = container.add_stream("aac", rate=sound.rate, options=SOUND_QUALITY, layout=_layout(sound))
    stream.codec_context.thread_count, stream.codec_context.time_base = 1, Fraction(1, sound.rate)
    return stream


def _layout(sound: Sound) -> str:
    return ("mono", "stereo")[len(sound.samples_CT) - 1]


def _sound_frame(sound: Sound) -> av.AudioFrame:
    """All samples; the stream cuts them into frames of its own length."""
    samples_CT = np.ascontiguousarray(sound.samples_CT.clip(-1, 1), dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(samples_CT, format="fltp", layout=_layout(sound))
    frame.sample_rate, frame.time_base, frame.pts = sound.rate, Fraction(1, sound.rate), 0
    return frame
