"""Clips: H.264, with AAC for sound, in MP4, by PyAV (FFmpeg and libx264).

Groups of pictures begin with a key frame and refer to no other group (closed GOPs, ITU-T H.264). So they can be encoded
in parallel.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Self, TypeAlias

import av
import numpy as np
from av.bitstream import BitStreamFilterContext
from av.codec.context import Flags, ThreadType
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, VideoReformatter
from numpy.typing import NDArray

from pipelines.media.metadata import NO_TEXTS, Texts, tags_of
from pipelines.media.sound import Sound

Packets: TypeAlias = "list[av.Packet[Any]]"

CODEC = "libx264"
# Without cpu-independent, libx264's fastest routines read memory that nothing wrote, and the bytes vary with it.
QUALITY = {"crf": "18", "preset": "medium", "x264-params": "cpu-independent=1"}
NUM_LAST_THREADS = 4
"""Threads of the last group's encoder, on every machine: the file waits for it alone once all frames are decoded."""
WHOLE_RANGE = "mvrange-thread=512"
"""Motion as far as H.264's levels allow, so that frames in several threads are searched as those in one are."""
REMOVE_SEI = "filter_units=remove_types=6"
"""Removes an encoder's SEI message about itself: a clip needs only the first group's."""

MIN_GROUP, MAX_GROUP = 4, 12
NUM_GROUPS = 8
"""Groups of a clip, one a thread. Their number is limited by the cost of key frames.

81 moving frames of 832x480 take 500 kB as one group, 631 kB in groups of 12 and 724 kB in groups of 8."""


def group_length(num_frames: int) -> int:
    """Return the number of frames of each group but the last."""
    return min(MAX_GROUP, max(MIN_GROUP, -(-num_frames // NUM_GROUPS)))


def configure(context: Any, size: tuple[int, ...], fps: int) -> None:
    """Set the options that the container and all encoders of a clip of this height and width share.

    One thread: PyAV's default is one slice a thread. Slices make files larger, and the bytes depend on their number.
    """
    (context.height, context.width), context.pix_fmt = (side + side % 2 for side in size), "yuv420p"
    context.framerate, context.time_base, context.thread_count = Fraction(fps), Fraction(1, fps), 1
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    context.options = QUALITY


def encode_group(frames_HWC: Sequence[NDArray[np.uint8]], first: int, fps: int, num_threads: int = 1) -> Packets:
    """Return the packets, in decoding order, of frames whose first has number ``first`` in the clip.

    Several threads encode several frames. The bytes follow from ``num_threads``, not from the cores or from timing.
    """
    context: Any = av.CodecContext.create(CODEC, "w")
    configure(context, frames_HWC[0].shape[:2], fps)
    if num_threads > 1:
        context.thread_count, context.thread_type = num_threads, ThreadType.FRAME
        context.options = {**QUALITY, "x264-params": f"{QUALITY['x264-params']}:{WHOLE_RANGE}"}
    context.flags |= Flags.global_header
    packets: Packets = []
    for frame in video_frames(frames_HWC, first):
        packets += context.encode(frame)
    packets += context.encode(None)
    return packets if first == 0 else [*_remove_sei(packets[0]), *packets[1:]]


def evenly_spaced(groups: Iterable[Packets]) -> Iterator[Packets]:
    """Yield the groups of a clip, in order, with decoding times one frame apart, like those of one encoder.

    A container derives a sample's duration from the next one's decoding time (ISO/IEC 14496-12, 8.6.1.2). Encoders
    delay packets to reorder frames, except in very short groups: there the clip would halt.
    """
    delay = num_packets = 0
    for number, packets in enumerate(groups):
        if number == 0:
            delay = -(packets[0].dts or 0)
        for packet in packets:
            packet.dts, packet.duration = num_packets - delay, 1
            num_packets += 1
        yield packets


def _remove_sei(packet: av.Packet[Any]) -> Packets:
    return BitStreamFilterContext(REMOVE_SEI, "h264").filter(packet)


def video_frames(frames_HWC: Iterable[NDArray[np.uint8]], first: int = 0) -> Iterator[av.VideoFrame]:
    """Yield the frames in yuv420p, BT.709, limited range, numbered from ``first``.

    One thread: groups are converted side by side. The values do not depend on the number of threads.
    """
    reformatter = VideoReformatter()  # one for all: each makes tables and threads of its own
    for index, frame_HWC in enumerate(frames_HWC, first):
        rgb = av.VideoFrame.from_numpy_buffer(_even(frame_HWC), format="rgb24")
        frame = reformatter.reformat(
            rgb, format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG, threads=1
        )
        frame.pts = index
        yield frame


def _even(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the frame with odd sides padded by a copy of the last row or column: 4:2:0 needs even sides."""
    height, width, _ = frame_HWC.shape
    if height % 2 or width % 2:
        frame_HWC = np.pad(frame_HWC, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame_HWC)


SOUND_QUALITY = {"b": "192k", "flags": "+bitexact"}
CONTAINER = {"movflags": "+faststart", "fflags": "+bitexact"}
"""Index before the frames, so that browsers play while they load; no time stamps of the encoding."""

Frame = NDArray[np.uint8]


def encode_clip(
    frames_FHWC: NDArray[np.uint8], fps: int, sound: Sound | None = None, num_threads: int = 1, texts: Texts = NO_TEXTS
) -> bytes:
    """Return a clip's bytes from all frames at once. They do not depend on ``num_threads``."""
    with ThreadPoolExecutor(num_threads) as workers, ClipEncoder(len(frames_FHWC), fps, workers) as clip:
        clip.add(frames_FHWC)
        return clip.finish(sound, texts)


class ClipEncoder:
    """Encodes an MP4 (yuv420p, BT.709) from frames added in pieces; odd sides are padded with a copy of the last line.

    ``workers`` encode groups in parallel while further frames are added. Only ``num_frames``, the expected number,
    decides the groups: the bytes depend neither on the workers nor on the pieces. At most ``max_waiting`` groups are
    held as pixels; then ``add`` blocks. The end of its context cancels groups that have not begun.
    """

    def __init__(self, num_frames: int, fps: int, workers: Executor, max_waiting: int = 16) -> None:
        if fps < 1:
            raise ValueError(f"{fps} frames per second: at least 1 is needed for a clip")
        self._fps, self._workers, self._length = fps, workers, group_length(num_frames)
        self._last = (num_frames - 1) // self._length
        self._slots = BoundedSemaphore(max_waiting)
        self._pending: list[Frame] = []
        self._groups: list[Future[Packets]] = []
        self._size: tuple[int, int] | None = None

    def add(self, frames_FHWC: NDArray[np.uint8]) -> None:
        """Add the next frames, uint8 (frames, height, width, 3), which must not change afterwards."""
        self._size = self._size or frames_FHWC.shape[1:3]
        for frame_HWC in frames_FHWC:
            self._pending.append(frame_HWC)
            if len(self._pending) == self._length:
                self._submit()

    def finish(self, sound: Sound | None = None, texts: Texts = NO_TEXTS) -> bytes:
        """Return the file, with ``texts``, once all groups are encoded; raise the error of a group's encoder."""
        if self._pending:
            self._submit()
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

    def _submit(self) -> None:
        self._slots.acquire()
        number, frames_HWC = len(self._groups), tuple(self._pending)
        self._pending.clear()
        num_threads = NUM_LAST_THREADS if number == self._last else 1
        group = self._workers.submit(encode_group, frames_HWC, number * self._length, self._fps, num_threads)
        group.add_done_callback(lambda _: self._slots.release())
        self._groups.append(group)


def _write(container: Any, groups: Iterable[Packets], size: tuple[int, int], fps: int, sound: Sound | None) -> None:
    stream: Any = container.add_stream(CODEC, rate=fps, options=QUALITY)
    configure(stream.codec_context, size, fps)
    track = None if sound is None else _add_sound(container, sound)
    container.start_encoding()  # for its headers; the packets come from encoders with equal options
    sound_packets = [] if track is None or sound is None else [*track.encode(_sound_frame(sound)), *track.encode(None)]
    for packets in evenly_spaced(groups):  # which may still be encoded, beside the sound
        for packet in packets:
            packet.stream = stream
        container.mux(packets)
    container.mux(sound_packets)


def _add_sound(container: Any, sound: Sound) -> Any:
    stream = container.add_stream("aac", rate=sound.rate, options=SOUND_QUALITY, layout=_layout(sound))
    stream.codec_context.thread_count, stream.codec_context.time_base = 1, Fraction(1, sound.rate)
    return stream


def _layout(sound: Sound) -> str:
    return ("mono", "stereo")[len(sound.samples_CT) - 1]


def _sound_frame(sound: Sound) -> av.AudioFrame:
    """Return all samples as one frame, which the stream cuts into its own frames."""
    samples_CT = np.ascontiguousarray(sound.samples_CT.clip(-1, 1), dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(samples_CT, format="fltp", layout=_layout(sound))
    frame.sample_rate, frame.time_base, frame.pts = sound.rate, Fraction(1, sound.rate), 0
    return frame
