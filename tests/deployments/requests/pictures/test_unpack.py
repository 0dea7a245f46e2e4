"""Strangers' files become pictures, and bad ones are refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sources import Source, Sources
from deployments.requests.pictures.unpack import unpack
from deployments.requests.request_errors import RequestError
from pipelines.request import NO_PICTURES, InputPictures
from tests.deployments.support.files import data_url, file_of, noise

LIMITS = PictureLimits()


def unpacked(*pictures: Source, mask: Source | None = None, limits: PictureLimits = LIMITS) -> InputPictures:
    return unpack(Sources(param="image", pictures=pictures, mask=mask), limits)


def pixels(data: bytes) -> Any:
    (picture,) = unpacked(data).pictures
    assert picture.mode == "RGB"
    return np.asarray(picture.image())


def refusal(*pictures: Source, mask: Source | None = None, limits: PictureLimits = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        unpacked(*pictures, mask=mask, limits=limits)
    return caught.value


def test_nothing_is_nothing() -> None:
    assert unpacked() is NO_PICTURES


@pytest.mark.parametrize(("format", "options"), [("png", {}), ("webp", {"lossless": True})])
def test_every_pixel_arrives(format: str, options: dict[str, Any]) -> None:
    image = noise(7, 5)
    assert (pixels(file_of(image, format, **options)) == np.asarray(image)).all()


def test_jpeg() -> None:
    image = Image.new("RGB", (9, 4), (200, 30, 60))
    assert np.abs(pixels(file_of(image, "jpeg", quality=95)).astype(int) - np.asarray(image)).max() < 4


def test_a_data_url_is_the_file_that_it_holds() -> None:
    data = file_of(noise(7, 5))
    urls = (data_url(data), data_url(data, "").replace("data:;", "data:;charset=utf-8;"), data_url(data, "IMAGE/X"))
    assert all(unpacked(url) == unpacked(data) for url in (*urls, urls[0].replace("+", "%2B").replace("=", "%3D")))


ORIENTATION = 0x0112


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["png", "webp", "jpeg"])
def test_pictures_are_upright(format: str, orientation: int) -> None:
    """Exif 2.32 defines where row 0 and column 0 of the stored picture are seen."""
    blocks = np.zeros((32, 48, 3), np.uint8)
    blocks[:16, :16] = (255, 0, 0)
    blocks[16:, 32:] = (0, 0, 255)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if format == "webp" else {"quality": 100, "subsampling": 0} if format == "jpeg" else {}
    seen = pixels(file_of(Image.fromarray(blocks), format, exif=exif, **options)).astype(int)
    expected = {
        1: blocks,
        2: blocks[:, ::-1],
        3: blocks[::-1, ::-1],
        4: blocks[::-1],
        5: blocks.swapaxes(0, 1),
        6: blocks[::-1].swapaxes(0, 1),
        7: blocks[::-1, ::-1].swapaxes(0, 1),
        8: blocks[:, ::-1].swapaxes(0, 1),
    }[orientation]
    assert seen.shape == expected.shape
    assert np.abs(seen - expected).max() < 8


def test_palettes_greys_and_cmyk_become_colours() -> None:
    image = noise(8, 8)
    palette = image.quantize(16)
    assert (pixels(file_of(palette)) == np.asarray(palette.convert("RGB"))).all()
    grey = image.convert("L")
    assert (pixels(file_of(grey)) == np.asarray(grey)[..., None]).all()
    assert (pixels(file_of(grey.convert("1"))) == np.asarray(grey.convert("1").convert("RGB"))).all()
    flat = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(pixels(file_of(flat, "jpeg", quality=100)).astype(int) - [255, 0, 0]).max() < 8


def test_16_bits_keep_the_higher_8() -> None:
    values = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    assert (pixels(file_of(Image.fromarray(values)))[..., 0] == values >> 8).all()


def test_only_what_shows_through_stays_transparent() -> None:
    opaque, clear = Image.new("RGBA", (4, 4), (1, 2, 3, 255)), Image.new("RGBA", (4, 4), (1, 2, 3, 0))
    modes = [picture.mode for picture in unpacked(file_of(opaque), file_of(clear)).pictures]
    assert modes == ["RGB", "RGBA"]


def test_metadata_is_dropped() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    (picture,) = unpacked(file_of(noise(4, 4), "jpeg", exif=exif)).pictures
    assert picture.image().info == {}
    assert len(picture.data) == 4 * 4 * 3


def test_the_first_view_of_a_camera_is_the_picture() -> None:
    first, second = noise(16, 16, seed=1), noise(16, 16, seed=2)
    data = file_of(first, "mpo", save_all=True, append_images=[second], quality=95)
    assert (pixels(data) == pixels(file_of(first, "jpeg", quality=95))).all()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int) -> bytes:
    """Return a file of a few kilobytes that claims this many pixels, and has as many zeros as fit."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(4 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [7100, 12_000, 30_000, 65_500])
def test_a_bomb_is_not_unpacked(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> None:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    error = refusal(file_of(noise(8, 8)), png_of_size(side, side))
    assert (error.code, error.param) == ("picture_too_large", "image")
    assert "make it smaller" in str(error)


def test_pixels_are_counted_together() -> None:
    limits = PictureLimits(max_picture_pixels=3 * 64)
    data = file_of(noise(8, 8))
    assert len(unpacked(data, data, mask=data, limits=limits).pictures) == 2
    error = refusal(data, data, data, mask=data, limits=limits)
    assert (error.code, error.param) == ("picture_too_large", "mask")
    assert "8x8 pixels; the pictures of a request may have 192 together" in str(error)


WHOLE_JPEG = file_of(noise(64, 64), "jpeg")
WHOLE_PNG = file_of(noise(64, 64))
WHOLE_WEBP = file_of(noise(64, 64), "webp")
ANIMATED = {"save_all": True, "append_images": [noise(8, 8, seed=1)]}

BAD = {
    "a gif": (file_of(noise(8, 8), "gif"), "bad_picture", "send a PNG, JPEG or WebP file"),
    "a bmp": (file_of(noise(8, 8), "bmp"), "bad_picture", "send a PNG, JPEG or WebP file"),
    "a tiff": (file_of(noise(8, 8), "tiff"), "bad_picture", "send a PNG, JPEG or WebP file"),
    "a pdf": (file_of(noise(8, 8), "pdf"), "bad_picture", "send a PNG, JPEG or WebP file"),
    "an svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "bad_picture", "send a PNG, JPEG or WebP file"),
    "nothing": (b"", "bad_picture", "send a PNG, JPEG or WebP file"),
    "half a jpeg": (WHOLE_JPEG[: len(WHOLE_JPEG) // 2], "bad_picture", "is broken, or a part of it is missing"),
    "half a png": (WHOLE_PNG[: len(WHOLE_PNG) // 2], "bad_picture", "is broken, or a part of it is missing"),
    "half a webp": (WHOLE_WEBP[: len(WHOLE_WEBP) // 2], "bad_picture", ""),
    "a head alone": (WHOLE_PNG[:33], "bad_picture", "send a PNG, JPEG or WebP file"),
    "zeros in the middle": (WHOLE_PNG[:100] + bytes(500) + WHOLE_PNG[600:], "bad_picture", "is broken"),
    "an animated png": (file_of(noise(8, 8), "png", **ANIMATED), "bad_picture", "is animated; send a still picture"),
    "an animated webp": (file_of(noise(8, 8), "webp", **ANIMATED), "bad_picture", "is animated; send a still picture"),
    "a line": (file_of(noise(101, 10)), "bad_picture", "101x10 pixels; no side may be longer than 10 times the other"),
    "a URL": ("https://a.example/x.png", "invalid_value", "pictures are not fetched from elsewhere; send the file"),
    "a file of the server": ("file:///etc/passwd", "invalid_value", "pictures are not fetched from elsewhere"),
    "no base64": ("data:image/png;base64,a*b", "invalid_value", "image is no base64"),
    "text of a URL": ("data:text/plain,abc", "invalid_value", "it must be a file, or a URL that holds one"),
    "a name": ("cat.png", "invalid_value", "image is 'cat.png': it must be a file, or a URL that holds one"),
}


@pytest.mark.parametrize(("source", "code", "message"), BAD.values(), ids=BAD.keys())
def test_bad_files_are_refused_with_a_sentence(source: Source, code: str, message: str) -> None:
    for error in (refusal(source), *([refusal(data_url(source))] if isinstance(source, bytes) else [])):
        assert (error.code, error.param) == (code, "image")
        assert message in str(error)
        assert "0x" not in str(error)


def test_bytes_and_numbers_are_limited() -> None:
    data = file_of(noise(8, 8))
    for source in (data, data_url(data)):
        error = refusal(source, limits=PictureLimits(max_picture_bytes=100))
        assert error.code == "picture_too_large"
        assert "a picture may have 100 at most" in str(error)
    error = refusal(data, data, limits=PictureLimits(max_input_pictures=1))
    assert "2 input pictures were sent; the limit is 1" in str(error)


@pytest.mark.parametrize("field", ["max_input_pictures", "max_picture_bytes", "max_picture_pixels"])
def test_limits_that_let_nothing_in_are_refused(field: str) -> None:
    limits: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=f"{field} is 0; it must be above 0"):
        PictureLimits(**limits)
    with pytest.raises(ValueError, match=r"max_picture_aspect is 0\.5; it must be at least 1"):
        PictureLimits(max_picture_aspect=0.5)
