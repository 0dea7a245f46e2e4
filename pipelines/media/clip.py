"""Clips: H.264, and AAC where they have sound, in MP4, with PyAV (FFmpeg and libx264).

Groups of pictures: pieces of a clip that begin with a key frame and refer to no other, so that each can be encoded
apart from the others (closed GOPs, ITU-T H.264).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Self, TypeAlias

import av
import numpy as np
from av.bitstream import BitStreamFilterContext
from av.codec.context import Flags
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from numpy.typing import NDArray

from pipelines.media.metadata import NO_TEXTS, Texts, tags_of

Packets: TypeAlias = "list[av.Packet[Any]]"

CODEC = "libx264"
# Without cpu-independent, libx264's fastest routines read memory that nothing wrote, and the bytes vary with it.
QUALITY = {"crf": "18", "preset": "medium", "x264-params": "cpu-independent=1"}
WITHOUT_NOTES = "filter_units=remove_types=6"
"""Every encoder begins with a page about itself, of which a clip needs one."""

MIN_GROUP, MAX_GROUP = 4, 12
NUM_GROUPS = 8
"""As many groups as a machine may have threads for, within what key frames cost: a moving picture of 832x480 with 81
frames takes 500 kB as one group, 631 in groups of 12 and 724 in groups of 8."""


def group_length(num_frames: int) -> int:
    """Returns the frames of each group but the last one."""
    return min(MAX_GROUP, max(MIN_GROUP, -(-num_frames // NUM_GROUPS)))


def configure(context: Any, size: tuple[int, ...], fps: int) -> None:
    """Sets what all encoders of a clip of this height and width share, and its container says once.

    One thread: with several, libx264's rate control (and so the bytes) depends on timing.
    """
    (context.height, context.width), context.pix_fmt = (side + side % 2 for side in size), "yuv420p"
    context.framerate, context.time_base, context.thread_count = Fraction(fps), Fraction(1, fps), 1
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    context.options = QUALITY


def encode_group(frames_HWC: Sequence[NDArray[np.uint8]], first: int, fps: int) -> Packets:
    """Returns the packets, in decoding order, of frames that are the clip's from number ``first`` on."""
    context: Any = av.CodecContext.create(CODEC, "w")
    configure(context, frames_HWC[0].shape[:2], fps)
    context.flags |= Flags.global_header
    packets: Packets = []
    for index, frame_HWC in enumerate(frames_HWC, first):
        packets += context.encode(_video_frame(frame_HWC, index))
    packets += context.encode(None)
    return packets if first == 0 else [*_without_notes(packets[0]), *packets[1:]]


def evenly_spaced(groups: Iterable[Packets]) -> Iterator[Packets]:
    """Yield the groups of a clip, in order, with one frame between any two packets, as one encoder would write them.

    A container derives the duration of a sample from the decoding time of the next one (ISO/IEC 14496-12, 8.6.1.2). An
    encoder delays its packets to reorder frames, but not in a group that is too short for that: at its begin the clip
    would halt.
    """
    delay = num_packets = 0
    for number, packets in enumerate(groups):
        if number == 0:
            delay = -(packets[0].dts or 0)
        for packet in packets:
            packet.dts, packet.duration = num_packets - delay, 1
            num_packets += 1
        yield packets


def _without_notes(packet: av.Packet[Any]) -> Packets:
    return BitStreamFilterContext(WITHOUT_NOTES, "h264").filter(packet)


def _video_frame(frame_HWC: NDArray[np.uint8], index: int) -> av.VideoFrame:
    rgb = av.VideoFrame.from_ndarray(_even(frame_HWC), format="rgb24")
    frame = rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
    frame.pts = index
    return frame


def _even(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of the last row or column where their number is odd: 4:2:0 needs even ones."""
    height, width, _ = frame_HWC.shape
    if height % 2 or width % 2:
        frame_HWC = np.pad(frame_HWC, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame_HWC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sound:
    """``samples_CT`` are float32 in [-1, 1], of one or two channels, ``rate`` of them a second."""

    samples_CT: NDArray[np.float32]
    rate: int

    def __post_init__(self) -> None:
        channels = self.samples_CT.shape[0]
        if self.samples_CT.ndim != 2 or channels not in (1, 2):
            raise ValueError(f"sound of the shape {self.samples_CT.shape}; (1 or 2 channels, samples) is allowed")


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
