"""Other readers see the pixels of files in strips, and the bytes depend on nothing else."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pipelines.media import picture
from pipelines.media.picture import SIGNATURE, STRIP_BYTES, encode_png

MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def noise(height: int, width: int, num_channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, num_channels), dtype=np.uint8)


def chunks_of(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kinds and contents. Raise AssertionError on a wrong checksum."""
    assert data.startswith(SIGNATURE)
    at = len(SIGNATURE)
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size) == (zlib.crc32(kind + content),)
        yield kind, content
        at += 12 + size


@pytest.mark.parametrize("num_channels", [1, 3, 4])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (33, 47), (300, 700), (2, STRIP_BYTES)])
def test_pillow_reads_the_pixels(height: int, width: int, num_channels: int) -> None:
    frame = noise(height, width, num_channels)
    with Image.open(io.BytesIO(encode_png(frame))) as picture:
        assert (picture.format, picture.mode) == ("PNG", MODES[num_channels])
        np.testing.assert_array_equal(np.asarray(picture).reshape(frame.shape), frame)


def test_ffmpeg_reads_the_pixels() -> None:
    frame = noise(300, 700)
    with av.open(io.BytesIO(encode_png(frame)), "r", format="png_pipe") as container:
        (read,) = container.decode(video=0)
        np.testing.assert_array_equal(read.to_ndarray(format="rgb24"), frame)


def test_all_strips_are_one_stream_whose_check_sums_are_right() -> None:
    frame = noise(300, 700)
    kinds, contents = zip(*chunks_of(encode_png(frame)), strict=True)
    num_strips = -(-300 // (STRIP_BYTES // (3 * 700 + 1)))
    assert num_strips == 3
    assert kinds == (b"IHDR", *[b"IDAT"] * (num_strips + 1), b"IEND")
    assert len(zlib.decompress(b"".join(contents[1:-1]))) == 300 * (1 + 3 * 700), "it checks the sum of all"


def test_flat_pictures_are_small() -> None:
    assert len(encode_png(np.full((512, 512, 3), 200, np.uint8))) < 10_000


def test_the_bytes_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = noise(300, 700)
    expected = encode_png(frame)
    with ThreadPoolExecutor(1) as one:
        monkeypatch.setattr(picture, "_threads", lambda: one)
        assert encode_png(frame) == expected


def test_a_part_of_a_larger_picture_needs_no_copy_before() -> None:
    frame = noise(64, 64)[::2, 8:40]
    assert encode_png(frame) == encode_png(np.ascontiguousarray(frame))


def test_other_numbers_of_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 channels; 1 \(grey\), 3 \(RGB\) or 4 \(RGBA\) are allowed"):
        encode_png(noise(4, 4, 2))
