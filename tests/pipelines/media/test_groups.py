"""Clips of groups of pictures that are encoded side by side equal those of one encoder."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pipelines.media import clip as clip_module
from pipelines.media.clip import QUALITY, ClipEncoder, encode_group, group_length
from pipelines.media.encode import encode_frames
from pipelines.media.sound import Sound
from tests.support.patience import PATIENCE_S

Frames = NDArray[np.uint8]
NUM_FRAMES, FPS = 27, 8
LENGTH = group_length(NUM_FRAMES)


@pytest.fixture(scope="module")
def frames() -> Frames:
    """Return a coarse landscape that drifts, with some grain: 4 pixels a frame, so that neighbours differ."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 13, 3)).repeat(16, 0).repeat(16, 1)
    drifting = np.stack([coarse[:, 4 * index : 4 * index + 96] for index in range(NUM_FRAMES)])
    smooth: Any = sum(np.roll(drifting, shift, axis) for axis in (1, 2) for shift in range(-6, 7)) / 26
    grainy: Frames = np.clip(smooth + rng.normal(0, 2, smooth.shape), 0, 255).astype(np.uint8)
    return grainy


def written(frames: Frames, num_threads: int, pieces: tuple[int, ...] = (), sound: Sound | None = None) -> bytes:
    with ThreadPoolExecutor(num_threads) as workers, ClipEncoder(len(frames), FPS, workers) as clip:
        for piece in np.split(frames, pieces):
            clip.add(piece)
        return clip.finish(sound)


def packets_of(data: bytes) -> list[Any]:
    with av.open(io.BytesIO(data), "r") as container:
        return [packet for packet in container.demux(video=0) if packet.size]


def decoded(data: bytes) -> list[NDArray[np.int16]]:
    with av.open(io.BytesIO(data), "r") as container:
        return [frame.to_ndarray(format="rgb24").astype(np.int16) for frame in container.decode(video=0)]


def test_bytes_are_the_same_with_any_number_of_threads_and_in_any_pieces(frames: Frames) -> None:
    sound = Sound(samples_CT=np.zeros((1, 16000), np.float32), rate=16000)
    alone = written(frames, 1, sound=sound)
    assert written(frames, 3, (1, 5, 9, 26), sound) == alone
    assert encode_frames(frames, "mp4", fps=FPS, sound=sound) == alone
    assert written(frames[::-1], 3, sound=sound) != alone


def test_bytes_are_the_same_on_any_number_of_threads_and_cores(frames: Frames) -> None:
    """The last group's encoder has several threads on one core as well."""
    alone = written(frames, 1)
    for num_threads in (2, 4, 8):
        assert written(frames, num_threads) == alone
    core = min(os.sched_getaffinity(0))
    pinned = ThreadPoolExecutor(2, initializer=os.sched_setaffinity, initargs=(0, {core}))
    with pinned as workers, ClipEncoder(NUM_FRAMES, FPS, workers) as clip:
        clip.add(frames)
        assert clip.finish() == alone


def test_the_last_group_alone_has_several_threads(frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()

    def watched(frames_HWC: Any, first: int, fps: int, num_threads: int) -> Any:
        counts.append(num_threads)
        return encode_group(frames_HWC, first, fps, num_threads)

    monkeypatch.setattr(clip_module, "encode_group", watched)
    written(frames, 1)
    assert counts == [1] * (NUM_FRAMES // LENGTH) + [4]


def test_several_threads_find_the_motion_that_one_finds() -> None:
    """By default libx264 with several threads searches part of the height only: 60 rows a frame are beyond it."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 2, 3), dtype=np.uint8))
    picture_HWC = np.asarray(noise.resize((64, 480), Image.Resampling.BICUBIC))
    falling = [np.roll(picture_HWC, 60 * index, 0) for index in range(8)]
    one, several = (list(map(bytes, encode_group(falling, 8, FPS, num_threads))) for num_threads in (1, 4))
    assert several == one


def test_frames_come_back_in_order_and_groups_begin_with_key_frames(frames: Frames) -> None:
    data = written(frames, 2)
    shown = decoded(data)
    assert len(shown) == NUM_FRAMES
    far = [[np.abs(pixels - frame).mean() for frame in frames] for pixels in shown]
    assert [int(np.argmin(row)) for row in far] == list(range(NUM_FRAMES))
    packets = packets_of(data)
    beat = packets[0].duration
    assert sorted(packet.pts for packet in packets) == [beat * index for index in range(NUM_FRAMES)]
    assert np.diff([packet.dts for packet in packets]).tolist() == [beat] * (NUM_FRAMES - 1)
    assert [packet.pts // beat for packet in packets if packet.is_keyframe] == list(range(0, NUM_FRAMES, LENGTH))
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        assert stream.duration is not None
        assert stream.time_base is not None
        assert stream.duration * stream.time_base == Fraction(NUM_FRAMES, FPS)


def test_a_group_is_decoded_without_the_others(frames: Frames) -> None:
    """A browser does this when it jumps to a key frame."""
    data = written(frames, 1)
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        container.seek(int((2 * LENGTH + 1) / FPS / stream.time_base), stream=stream, backward=True)
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(shown) == NUM_FRAMES - 2 * LENGTH
    np.testing.assert_array_equal(np.stack(shown), np.stack(decoded(data)[2 * LENGTH :]))


def test_one_encoder_with_as_many_key_frames_makes_no_smaller_a_clip(
    frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [encode_group(list(frames[at : at + LENGTH]), at, FPS) for at in range(0, NUM_FRAMES, LENGTH)]
    intervals = f"{QUALITY['x264-params']}:keyint={LENGTH}:min-keyint={LENGTH}:scenecut=0"
    monkeypatch.setitem(QUALITY, "x264-params", intervals)
    single = encode_group(list(frames), 0, FPS)
    assert [packet.pts for packet in single if packet.is_keyframe] == list(range(0, NUM_FRAMES, LENGTH))
    assert sum(packet.size for group in groups for packet in group) <= 1.05 * sum(packet.size for packet in single)


@pytest.mark.parametrize(("num_frames", "length"), [(1, 4), (17, 4), (81, 11), (400, 12)])
def test_short_clips_have_as_many_groups_as_long_ones(num_frames: int, length: int) -> None:
    assert group_length(num_frames) == length


class HeldGroups(ThreadPoolExecutor):
    """Holds groups back, and encodes the first once there are ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__(1)
        self.most, self.waiting, self.largest = most, list[tuple[Future[Any], Any]](), 0

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: work(*args, **kwargs)))
        self.largest = max(self.largest, len(self.waiting))
        if len(self.waiting) == self.most:
            super().submit(self.encode_one)
        return future

    def encode_all(self) -> None:
        def encode() -> None:
            for _ in tuple(self.waiting):
                self.encode_one()

        super().submit(encode).result()

    def encode_one(self) -> None:
        future, work = self.waiting[0]
        packets = work()
        self.waiting.pop(0)
        future.set_result(packets)


def test_no_more_groups_are_held_than_was_said(frames: Frames) -> None:
    """Without waiting, all groups would be there before the first is encoded."""
    whole = frames[: 6 * LENGTH]
    with HeldGroups(2) as workers, ClipEncoder(len(whole), FPS, workers, max_waiting=2) as clip:
        clip.add(whole)
        workers.encode_all()
        data = clip.finish()
    assert workers.largest == 2
    assert data == written(whole, 1)


def test_sound_is_encoded_beside_the_last_group(frames: Frames, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Sound(samples_CT=np.zeros((1, 16000), np.float32), rate=16000)
    wanted, has_begun, waited = written(frames, 1, sound=sound), threading.Event(), list[bool]()
    add_sound = clip_module._add_sound

    def watched(*args: Any) -> Any:
        stream = add_sound(*args)

        def encode(samples: Any) -> Any:
            has_begun.set()
            return stream.encode(samples)

        return SimpleNamespace(encode=encode)

    def late(frames_HWC: Any, first: int, *options: Any) -> Any:
        if first + LENGTH >= NUM_FRAMES:
            waited.append(has_begun.wait(PATIENCE_S))
        return encode_group(frames_HWC, first, *options)

    monkeypatch.setattr(clip_module, "_add_sound", watched)
    monkeypatch.setattr(clip_module, "encode_group", late)
    assert written(frames, 1, sound=sound) == wanted
    assert waited == [True]


def test_what_an_encoder_raised_ends_the_clip(frames: Frames) -> None:
    with ThreadPoolExecutor(1) as workers, ClipEncoder(NUM_FRAMES, FPS, workers) as clip:
        clip.add(frames[:LENGTH])
        clip.add(frames[:LENGTH].astype(np.float32))
        with pytest.raises(ValueError, match="dtype"):
            clip.finish()
