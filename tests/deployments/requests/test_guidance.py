"""``guidance_scale`` means what it means to diffusers' own pipeline of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from deployments.requests.bodies import ImageBody
from deployments.requests.rules import Requester, RequestRules
from deployments.service.interface import ModelCard
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.support.checkpoints import tiny_models, tiny_others, tiny_unknown

SAID: dict[str, Any] = {"prompt": "a red circle", "width": 80, "height": 48, "num_inference_steps": 2}


def z_image_base(path: Path) -> Path:
    """Write a Z-Image, whose schedule tells it from Turbo."""
    file = tiny_models.z_image(path) / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shift": 6.0}))
    return path


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "z image": (z_image_base, "ZImagePipeline"),
    "krea 2": (tiny_others.krea2, "Krea2Pipeline"),
    "sdxl": (tiny_unknown.sdxl, "StableDiffusionXLPipeline"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCard, Pipeline, Any]:
    """Return the model's card, our pipeline, and diffusers'."""
    make, name = MODELS[request.param]
    folder = make(tmp_path_factory.mktemp("model"))
    checkpoint = Checkpoint(folder)
    theirs = getattr(diffusers, name).from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    card = ModelCard(name="m", family=checkpoint.spec.family, created=0, defaults=checkpoint.defaults)
    return card, load_pipeline(checkpoint), theirs


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 4.0])
def test_guidance_scale_is_that_of_diffusers(scale: float, model: tuple[ModelCard, Pipeline, Any]) -> None:
    card, ours, theirs = model
    body = ImageBody(**SAID, seed=5, guidance_scale=scale)
    request = RequestRules(card).check(body, NO_PICTURES, Requester(request_id="id"))
    generator = torch.Generator().manual_seed(5)
    expected = theirs(**SAID, guidance_scale=scale, generator=generator, output_type="np").images[0]
    pixels_FCHW = ours.decoder.pixels(ours.denoise(request))
    np.testing.assert_allclose(pixels_FCHW[0].movedim(0, -1).numpy(), expected, rtol=0, atol=2e-3)
