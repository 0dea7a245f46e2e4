"""Players read the right frame rate from clips of every length."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from av.filter import Graph

from pipelines.media.clip import encode_clip, group_length

LONGEST = 260
FPS = 24
MOVING = np.stack(
    [np.roll(np.full((16, 16, 3), 90, np.uint8) * np.tri(16, dtype=np.uint8)[..., None], i, 1) for i in range(LONGEST)]
)


def numbers_of_frames() -> list[int]:
    """Return one number for each pair of a group's length and the last group's, among 1 to ``LONGEST``."""
    pairs = {(group_length(num), num % group_length(num)): num for num in range(LONGEST, 0, -1)}
    return sorted(pairs.values())


def read_rate(data: bytes) -> tuple[Fraction, set[int | None], list[int]]:
    """Return FFmpeg's average rate, the durations of samples, and the times of shown frames in ticks."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        times = sorted(packet.pts for packet in packets if packet.pts is not None)
        assert stream.average_rate is not None
        return stream.average_rate, {packet.duration for packet in packets}, times


def num_frames_again(data: bytes) -> int:
    """Return how many frames FFmpeg makes of a clip at a constant rate (its filter ``fps``, like ``ffmpeg -r``)."""
    with av.open(io.BytesIO(data), "r") as container:
        stream, graph = container.streams.video[0], Graph()
        graph.link_nodes(graph.add_buffer(template=stream), graph.add("fps", str(FPS)), graph.add("buffersink"))
        graph.configure()
        for frame in container.decode(stream):
            graph.push(frame)
        graph.push(None)
        num = 0
        while True:
            try:
                graph.pull()
            except (av.EOFError, av.BlockingIOError):
                return num
            num += 1


def test_every_number_of_frames_has_its_rate() -> None:
    """A last group of one or two frames has no reordering, and must not begin later for that."""
    for num in numbers_of_frames():
        data = encode_clip(MOVING[:num], FPS)
        rate, durations, times = read_rate(data)
        assert (num, rate, len(durations)) == (num, Fraction(FPS), 1)
        assert times == [index * next(iter(durations)) for index in range(num)]  # type: ignore[operator]
        assert num_frames_again(data) == num


@pytest.mark.parametrize("fps", [8, 12, 15, 16, 25, 30, 60, 120])
def test_a_short_last_group_has_the_rate_of_the_others(fps: int) -> None:
    """The clips have whole groups, and last ones of one or two frames."""
    for num in (2, 17, 97, 121, 122):
        rate, durations, times = read_rate(encode_clip(MOVING[:num], fps))
        assert (num, rate, len(durations)) == (num, Fraction(fps), 1)
        assert times == [index * next(iter(durations)) for index in range(num)]  # type: ignore[operator]


def test_every_rate_is_the_files() -> None:
    for fps in range(1, 121):
        rate, durations, _ = read_rate(encode_clip(MOVING[:5], fps))
        assert (rate, len(durations)) == (Fraction(fps), 1)
