"""Pictures travel from a client to an encoder."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from PIL import Image

from pipelines.request import InputPicture


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_picture_stays_what_it_is(mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA").convert(mode)
    again = pickle.loads(pickle.dumps(InputPicture.of(image))).image()
    assert (again.mode, again.size) == (mode, (7, 5))
    assert again.tobytes() == image.tobytes()


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="mode CMYK"):
        InputPicture.of(Image.new("CMYK", (1, 1)))
