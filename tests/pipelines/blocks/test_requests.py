"""Blocks get a request's pictures in the right form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PIL import Image

from pipelines.blocks.opened import inputs_of
from pipelines.models.spec import PICTURE
from pipelines.request import InputPicture, InputPictures

PICTURES = InputPictures(pictures=(InputPicture.of(Image.new("RGBA", (16, 16), (255, 0, 0, 128))),))


@pytest.mark.parametrize(("num_layers", "mode"), [(0, "RGB"), (2, "RGBA")])
def test_opacity_is_for_models_of_layers_alone(num_layers: int, mode: str) -> None:
    defaults = replace(PICTURE, max_pictures=1, max_layers=num_layers)
    request = defaults.request(num_pictures=1, num_layers=num_layers)
    assert inputs_of(request, {"image"}, PICTURES)["image"].mode == mode
