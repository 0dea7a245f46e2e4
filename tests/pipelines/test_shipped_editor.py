"""The shipped editor runs as in diffusers: it makes the requested change and keeps the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path
from pipelines.request import InputPicture, InputPictures, MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.test_shipped import shares_of_colours

NAME = "kontext-shapes"
SIDE = 128


def circle_and_square(side: int = SIDE) -> Image.Image:
    """Draw a large red circle at the left and a large green square at the right, on white."""
    picture = Image.new("RGB", (side, side), "white")
    draw, unit = ImageDraw.Draw(picture), side // 8
    draw.ellipse((unit, 3 * unit, 3 * unit, 5 * unit), fill=(220, 30, 40))
    draw.rectangle((5 * unit, 3 * unit, 7 * unit, 5 * unit), fill=(30, 160, 70))
    return picture


@pytest.fixture(scope="module")
def ours() -> Pipeline:
    return load_pipeline(Checkpoint.open(NAME))


def request_of(prompt: str, num_steps: int) -> MediaRequest:
    defaults = Checkpoint.open(NAME).defaults
    return defaults.request(prompt=prompt, num_inference_steps=num_steps, num_pictures=1, seed=5)


def edited(ours: Pipeline, prompt: str, num_steps: int) -> NDArray[np.uint8]:
    pictures = InputPictures(pictures=(InputPicture.of(circle_and_square()),))
    picture_HWC: NDArray[np.uint8]
    (picture_HWC,) = ours.run(request_of(prompt, num_steps), pictures)
    return picture_HWC


def test_pixels_equal_diffusers(ours: Pipeline) -> None:
    own = FluxKontextPipeline.from_pretrained(resolve_path(NAME), dtype=torch.float32)
    own.set_progress_bar_config(disable=True)
    prompt = "make the circle blue"
    (expected_HWC,) = own(
        image=circle_and_square(), prompt=prompt, height=SIDE, width=SIDE, max_area=SIDE * SIDE, num_inference_steps=3,
        guidance_scale=2.5, max_sequence_length=48, _auto_resize=False, generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images  # fmt: skip
    difference = edited(ours, prompt, 3).astype(int) - (expected_HWC * 255).round().astype(int)
    assert np.abs(difference).max() <= 1


def test_what_is_asked_is_done_and_the_rest_stays(ours: Pipeline) -> None:
    before, after = np.asarray(circle_and_square()), edited(ours, "make the circle blue", 20)
    left, right = after[:, : SIDE // 2], after[:, SIDE // 2 :]
    assert shares_of_colours(before[None])["red"] > 0.02
    assert shares_of_colours(left[None])["blue"] > 0.04
    assert shares_of_colours(after[None])["red"] < 0.005
    assert np.abs(right.astype(int) - before[:, SIDE // 2 :]).mean() < 12, "the square is where it was"
