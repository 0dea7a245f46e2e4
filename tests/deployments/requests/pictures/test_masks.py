"""Masks select what is painted, and must fit their picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.deployments.requests.pictures.test_unpack import ORIENTATION, refusal, unpacked
from tests.deployments.support.files import file_of, noise


def mask_of(image: Image.Image, **options: Any) -> Any:
    inputs = unpacked(file_of(noise(*image.size)), mask=file_of(image, **options))
    assert inputs.mask is not None
    assert inputs.mask.mode == "L"
    return np.asarray(inputs.mask.image())


def test_what_is_transparent_in_a_mask_is_painted() -> None:
    image = noise(6, 4, "RGBA")
    assert (mask_of(image) == 255 - np.asarray(image)[..., 3]).all()


def test_what_is_white_in_a_mask_without_transparency_is_painted() -> None:
    half = np.zeros((4, 6), np.uint8)
    half[:, 3:] = 255
    grey = Image.fromarray(half)
    for image in (grey, grey.convert("RGB"), grey.convert("RGBA"), grey.convert("1"), grey.convert("LA")):
        assert (mask_of(image) == half).all(), image.mode


def test_a_palette_with_a_transparent_colour_is_a_mask() -> None:
    image = Image.fromarray(np.arange(4, dtype=np.uint8).reshape(2, 2), "P")
    image.putpalette([0, 0, 0, 9, 9, 9, 80, 80, 80, 255, 255, 255])
    assert mask_of(image, transparency=2).tolist() == [[0, 0], [255, 0]]


@pytest.mark.parametrize("image", [Image.new("L", (8, 8), 0), Image.new("RGB", (8, 8), 0)], ids=["L", "RGB"])
def test_a_mask_that_marks_nothing_is_refused(image: Image.Image) -> None:
    error = refusal(file_of(noise(8, 8)), mask=file_of(image))
    assert (error.param, error.code) == ("mask", "invalid_value")
    assert "marks nothing" in str(error)


def test_a_mask_of_another_size_is_refused() -> None:
    error = refusal(file_of(noise(8, 8)), file_of(noise(9, 9)), mask=file_of(noise(9, 9, "RGBA")))
    assert error.param == "mask"
    assert "mask has 9x9 pixels; the first picture has 8x8: make them the same" in str(error)


def test_a_mask_is_as_upright_as_its_picture() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    inputs = unpacked(file_of(noise(8, 4), "jpeg", exif=exif), mask=file_of(noise(4, 8, "RGBA")))
    assert (inputs.pictures[0].width, inputs.pictures[0].height) == (4, 8)
