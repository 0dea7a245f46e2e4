"""Groups of pictures: pieces of a clip that begin with a key frame and refer to no other, so that each can be encoded
apart from the others (closed GOPs, ITU-T H.264).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import av
import numpy as np
from av.bitstream import BitStreamFilterContext
from av.codec.context import Flags
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from numpy.typing import NDArray

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
