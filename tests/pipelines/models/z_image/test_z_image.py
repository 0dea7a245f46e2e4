"""Z-Image and Z-Image-Turbo are told apart by their published folders, and drawn as their publisher draws them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.loading import PUBLISHED
from tests.pipelines.support.checkpoints import tiny_models
from tests.pipelines.support.references.own_call import own_latents

TOLERANCE = 1e-4
PAGES_GUIDANCE = 4.0
"""``guidance_scale`` of ``ZImagePipeline`` on the model's page."""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder of another name with the published files."""
    copied = shutil.copytree(PUBLISHED / request.param, tmp_path / "downloaded")
    (copied / "troupe.json").unlink(missing_ok=True)
    return copied


@pytest.mark.parametrize(
    ("folder", "num_steps", "scale"), [("Z-Image", 50, 5.0), ("Z-Image-Turbo", 9, 1.0)], indirect=["folder"]
)
def test_a_folder_says_how_many_steps_and_how_much_guidance(folder: Path, num_steps: int, scale: float) -> None:
    found = Checkpoint.open(str(folder), weights=False).defaults
    assert (found.num_inference_steps, found.true_cfg_scale) == (num_steps, scale)
    (folder / "troupe.json").write_text(json.dumps({"num_inference_steps": 28}))
    assert Checkpoint.open(str(folder), weights=False).defaults.num_inference_steps == 28


def test_guidance_by_default_is_that_of_the_models_page(tmp_path: Path) -> None:
    """Diffusers' two pipelines count guidance from different predictions, and draw the same picture."""
    tiny = tiny_models.z_image(tmp_path / "tiny")
    schedule = tiny / "scheduler" / "scheduler_config.json"
    schedule.write_text(json.dumps({**json.loads(schedule.read_text()), "shift": 6.0}))
    defaults = Checkpoint.open(str(tiny), weights=False).defaults
    request = replace(defaults.request(prompt="a red circle"), width=48, height=32, num_inference_steps=3)
    pipeline: Any = ZImagePipeline.from_pretrained(tiny)
    pipeline.set_progress_bar_config(disable=True)
    said = {"prompt": request.prompt, "width": 48, "height": 32, "num_inference_steps": 3, "output_type": "latent"}
    (latents_BCHW,) = pipeline(
        **said, guidance_scale=PAGES_GUIDANCE, generator=torch.Generator().manual_seed(request.seed), return_dict=False
    )
    assert relative_difference(own_latents(tiny, request).reshape(latents_BCHW.shape), latents_BCHW) <= TOLERANCE
