"""Colours follow the file's own profile, and transparent parts show white."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sources import Sources
from deployments.requests.pictures.unpack import unpack
from pipelines.blocks.opened import inputs_of
from pipelines.request import InputPicture, InputPictures
from tests.deployments.support.files import file_of, noise
from tests.pipelines.support.sample_requests import picture

GAMMA = 2.2
P3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
SRGB = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
"""Linear colours to XYZ under D50: the colorants in the profiles of Display P3 and sRGB."""


def fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(65536 * value)) for value in values)


def display_p3() -> bytes:
    """Return a profile of three colorants and one curve by ICC.1:2010 (clauses 7.2, 8.3, 10.5 and 10.27)."""
    xyz = {name: b"XYZ \0\0\0\0" + fixed(*P3[:, column]) for column, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * GAMMA)) + b"\0\0"
    white = {b"wtpt": b"XYZ \0\0\0\0" + fixed(0.9642, 1.0, 0.8249)}
    tags = {**xyz, **white, **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)}
    table, body, begin = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", begin + len(body), len(data))
        body += data
    size = struct.pack(">I", begin + len(body))
    head = size + b"\0\0\0\0\x02\x10\0\0mntrRGB XYZ " + b"\0" * 12 + b"acsp" + b"\0" * 28 + fixed(0.9642, 1.0, 0.8249)
    return head.ljust(128, b"\0") + table + body


def in_srgb(colours: NDArray[np.uint8]) -> NDArray[Any]:
    """Convert by the definitions of both spaces (IEC 61966-2-1 for the curve of sRGB)."""
    linear = np.clip((colours / 255) ** (round(256 * GAMMA) / 256) @ (np.linalg.inv(SRGB) @ P3).T, 0, 1)
    curved: NDArray[Any] = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return 255 * curved


def unpacked(data: bytes) -> InputPicture:
    (only,) = unpack(Sources(param="image", pictures=(data,)), PictureLimits()).pictures
    return only


@pytest.mark.parametrize("form", ["png", "webp", "jpeg", "opacity", "palette"])
def test_colours_of_a_profile_become_those_of_srgb(form: str) -> None:
    image = Image.new("RGB", (8, 8), (200, 80, 40))
    image.paste((60, 180, 90), (0, 0, 4, 8))
    stored = {"opacity": image.convert("RGBA"), "palette": image.quantize(4)}.get(form, image)
    if form == "opacity":
        stored.putpixel((7, 7), (0, 0, 0, 100))
    kinds: dict[str, dict[str, Any]] = {"webp": {"lossless": True}, "jpeg": {"quality": 100, "subsampling": 0}}
    kind = form if form in kinds else "png"
    seen = unpacked(file_of(stored, kind, icc_profile=display_p3(), **kinds.get(form, {}))).image()
    assert seen.mode == ("RGBA" if form == "opacity" else "RGB")
    expected = in_srgb(np.asarray(image)[:4])
    assert np.abs(expected - np.asarray(image)[:4]).max() > 15, "the profile matters"
    assert np.abs(np.asarray(seen.convert("RGB"))[:4] - expected).max() <= (6 if form == "jpeg" else 2)
    if form == "opacity":
        assert seen.getchannel("A").getpixel((7, 7)) == 100


@pytest.mark.parametrize(
    "profile", [b"", b"no profile", ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()]
)
def test_a_profile_that_does_not_fit_changes_nothing(profile: bytes) -> None:
    image = noise(5, 5)
    assert unpacked(file_of(image, icc_profile=profile)).data == image.tobytes()


def test_what_is_transparent_shows_white() -> None:
    """Half-transparent red over hidden black looks as on a white page in any viewer."""
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    image.paste((255, 0, 0, 128), (0, 0, 8, 16))
    given = InputPictures(pictures=(unpacked(file_of(image)),))
    whole = np.asarray(inputs_of(picture(num_pictures=1), ("image",), given)["image"])
    assert whole.shape == (16, 16, 3)
    assert np.abs(whole[0, 0].astype(int) - [255, 127, 127]).max() <= 1
    assert (whole[0, 15] == 255).all()
    cut = given.cut_to(16, 16).pictures[0].image()
    assert np.array_equal(np.asarray(cut), whole)
    layers = inputs_of(picture(num_pictures=1, num_layers=2), ("image",), given)["image"]
    assert layers.mode == "RGBA"
