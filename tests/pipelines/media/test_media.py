from __future__ import annotations

import io
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pipelines.media.encode import encode_frames, encode_thumbnail
from pipelines.media.sound import Sound
from pipelines.size import MAX_SIDES

ROOT = Path(__file__).parents[3]


def gradient(num_frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return a smooth picture with a bright square that moves to the right."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = (255 * rows / height, 255 * columns / width, np.full_like(rows, 96))
    frames = np.repeat(np.stack(channels, axis=-1)[None], num_frames, axis=0).astype(np.uint8)
    for index in range(num_frames):
        frames[index, 8:16, 4 * index : 4 * index + 8] = 240
    return frames


def decoded_picture(data: bytes) -> tuple[str | None, NDArray[np.int16]]:
    with Image.open(io.BytesIO(data)) as picture:
        return picture.format, np.asarray(picture.convert("RGB")).astype(np.int16)


def decoded_clip(data: bytes) -> tuple[list[NDArray[np.int16]], av.VideoStream]:
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24").astype(np.int16) for frame in container.decode(stream)]
    return frames, stream


def test_png_is_lossless() -> None:
    frames = gradient(1, 33, 47)
    kind, pixels = decoded_picture(encode_frames(frames, "png"))
    assert kind == "PNG"
    np.testing.assert_array_equal(pixels, frames[0])


@pytest.mark.parametrize(("format", "is_lossless"), [("png", True), ("webp", False)])
def test_opacity_is_kept(format: Literal["png", "webp"], is_lossless: bool) -> None:
    frames = np.concatenate([gradient(1, 33, 47), gradient(1, 33, 47)[..., :1]], axis=-1)
    with Image.open(io.BytesIO(encode_frames(frames, format))) as picture:
        pixels = np.asarray(picture)
    np.testing.assert_array_equal(pixels[..., 3], frames[0, ..., 3])
    assert np.array_equal(pixels, frames[0]) is is_lossless


def test_jpeg_has_no_opacity() -> None:
    with pytest.raises(ValueError, match="jpeg has no opacity; use png or webp"):
        encode_frames(np.zeros((1, 8, 8, 4), np.uint8), "jpeg")


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_compression_is_the_quality_kept(format: Literal["jpeg", "webp"]) -> None:
    frames = gradient(1, 64, 96)
    high, low = (encode_frames(frames, format, compression=level) for level in (100, 20))
    kind, pixels = decoded_picture(high)
    assert kind == format.upper()
    assert np.abs(pixels - frames[0]).mean() < 2
    assert len(low) < len(high)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (63, 97), (64, 95)])
def test_mp4_holds_the_frames(height: int, width: int) -> None:
    frames = gradient(7, height, width)
    decoded, stream = decoded_clip(encode_frames(frames, "mp4", fps=12))
    assert len(decoded) == 7
    assert (stream.codec_context.name, stream.format.name, stream.average_rate) == ("h264", "yuv420p", Fraction(12))
    assert decoded[0].shape == (height + height % 2, width + width % 2, 3)
    for frame, pixels in zip(frames, decoded, strict=True):
        assert np.abs(pixels[:height, :width] - frame).mean() < 4


def test_mp4_colours_are_tagged_and_right() -> None:
    red = np.zeros((1, 32, 32, 3), np.uint8)
    red[..., 0] = 220
    decoded, stream = decoded_clip(encode_frames(red, "mp4", fps=1))
    assert stream.codec_context.colorspace == 1, "BT.709"
    assert np.abs(decoded[0] - red[0]).max() <= 4


def test_mp4_bytes_are_the_same_every_time_and_start_with_the_index() -> None:
    frames = gradient(9, 64, 64)
    first, second = (encode_frames(frames, "mp4", fps=16) for _ in range(2))
    assert first == second
    assert 0 < first.index(b"moov") < first.index(b"mdat")


def test_thumbnail_is_small_and_keeps_the_ratio() -> None:
    kind, pixels = decoded_picture(encode_thumbnail(gradient(1, 480, 960)[0]))
    assert (kind, pixels.shape) == ("WEBP", (160, 320, 3))
    assert decoded_picture(encode_thumbnail(gradient(1, 48, 64)[0]))[1].shape == (48, 64, 3)


@pytest.mark.parametrize(
    ("num_frames", "format", "options", "message"),
    [
        (2, "png", {}, "one frame, not 2"),
        (2, "mp4", {}, "frames per second"),
        (1, "gif", {}, "known: png, jpeg, webp, mp4"),
        (1, "jpeg", {"compression": 101}, "0 to 100"),
    ],
)
def test_bad_wishes_are_named(num_frames: int, format: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_frames(gradient(num_frames, 16, 32), format, **options)


CLIP_DIGEST = """
import hashlib, numpy as np
from PIL import Image
from pipelines.media.encode import encode_frames
rng = np.random.default_rng(0)
def clouds(size):
    noise = (Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(9))
    return np.stack([np.asarray(frame.resize((64, 64), Image.Resampling.BICUBIC)) for frame in noise])
frames = (0.8 * clouds(4)[:1] + 0.2 * clouds(16)).astype(np.uint8)
print(hashlib.sha256(encode_frames(frames, "mp4", fps=8)).hexdigest())
"""


def test_clips_do_not_depend_on_what_memory_held_before() -> None:
    """glibc fills every block with the byte in ``MALLOC_PERTURB_``, which shows reads of unwritten memory."""
    digests = set()
    for fill in ("0", "85", "170"):
        env = os.environ | {"MALLOC_PERTURB_": fill}
        command = [sys.executable, "-c", CLIP_DIGEST]
        digests.add(subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=True).stdout)
    assert len(digests) == 1


def test_a_clip_has_its_sound() -> None:
    """A tone keeps its pitch and length beside the same pictures; the bytes are always the same."""
    rate, pitch = 16000, 440.0
    times_T = np.arange(rate) / rate
    samples_CT = np.stack([0.5 * np.sin(2 * np.pi * pitch * times_T)] * 2).astype(np.float32)
    frames = gradient(8, 16, 32)
    sound = Sound(samples_CT=samples_CT, rate=rate)
    data, again = (encode_frames(frames, "mp4", fps=8, sound=sound) for _ in range(2))
    assert data == again
    with av.open(io.BytesIO(data), "r") as container:
        heard_CT = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        assert container.streams.audio[0].sample_rate == rate
    assert heard_CT.shape[0] == 2
    assert abs(heard_CT.shape[1] - rate) <= 2048
    spectrum = np.abs(np.fft.rfft(heard_CT[0, :rate]))
    assert abs(float(spectrum.argmax()) * rate / heard_CT[0, :rate].size - pitch) < 2
    silent, _ = decoded_clip(encode_frames(frames, "mp4", fps=8))
    assert all(np.array_equal(one, other) for one, other in zip(decoded_clip(data)[0], silent, strict=True))


def test_sound_has_one_channel_or_two() -> None:
    with pytest.raises(ValueError, match="1 or 2 channels"):
        Sound(samples_CT=np.zeros((3, 5), np.float32), rate=16000)


@pytest.mark.parametrize("format", MAX_SIDES)
@pytest.mark.parametrize("is_wide", [True, False])
def test_files_hold_sides_so_long_and_no_longer(format: Literal["webp", "jpeg", "mp4"], is_wide: bool) -> None:
    longest = MAX_SIDES[format]
    for side, is_held in ((longest, True), (longest + 1, False)):
        frames = np.zeros((1, 16, side, 3) if is_wide else (1, side, 16, 3), np.uint8)
        if is_held:
            assert encode_frames(frames, format, fps=8)
        else:
            with pytest.raises((ValueError, OSError, av.FFmpegError)):
                encode_frames(frames, format, fps=8)
