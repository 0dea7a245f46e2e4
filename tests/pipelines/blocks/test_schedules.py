"""Steps of requests and of schedules agree, although some schedulers of diffusers count differently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from pipelines.checkpoint import Checkpoint
from pipelines.models.spec import PICTURE
from pipelines.run import Pipeline, load_pipeline
from pipelines.schedules import SECOND_ORDER, with_schedule
from pipelines.size import Size
from tests.pipelines.support.checkpoints.tiny_unknown import sdxl
from tests.pipelines.support.references.picture_cases import drawn
from tests.pipelines.support.references.video import pictures_of

USUAL = ("EulerDiscreteScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in (*USUAL, *SECOND_ORDER) if name != "DPMSolverSDEScheduler"),  # it needs torchsde
    ("PNDMScheduler", {}),
    ("PNDMScheduler", {"skip_prk_steps": True}),
]


def with_scheduler(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """Write the scheduler into ``folder``, in place of its own if it has one."""
    file, index = folder / "scheduler" / "scheduler_config.json", folder / "model_index.json"
    file.parent.mkdir(exist_ok=True)
    own = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**own, **config, "_class_name": name}))
    parts = json.loads(index.read_text()) if index.is_file() else {}
    index.write_text(json.dumps({**parts, "scheduler": ["diffusers", name]}))
    return folder


@pytest.mark.parametrize(("name", "config"), CONFIGS, ids=str)
def test_steps_are_as_many_as_the_scheduler_has(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    defaults = with_schedule(with_scheduler(tmp_path, name, config), PICTURE)
    for number in (5, 8):
        scheduler = getattr(diffusers, name)(**config)
        scheduler.set_timesteps(number)
        assert defaults.num_steps_of(defaults.request(num_inference_steps=number)) == len(scheduler.timesteps)


def test_all_solvers_of_second_order_are_known() -> None:
    names = [name for name in dir(diffusers) if name.endswith("DiscreteScheduler") and not name.startswith("Flax")]
    found = {name for name in names if getattr(getattr(diffusers, name), "order", 1) == 2}
    assert found <= set(SECOND_ORDER)
    assert len(found) > 3


HEUN: tuple[str, dict[str, Any]] = ("HeunDiscreteScheduler", {})
MULTISTEP = ("PNDMScheduler", {"skip_prk_steps": True})


@pytest.fixture(scope="module", params=[HEUN, MULTISTEP], ids=str)
def sdxl_with(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Pipeline, Callable[[str], Any]]:
    """Return a checkpoint, our pipeline, and diffusers' pipeline of a class."""
    folder = with_scheduler(sdxl(tmp_path_factory.mktemp("model")), *request.param)

    def theirs(name: str) -> Any:
        pipeline = getattr(diffusers, name).from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return Checkpoint(folder), load_pipeline(Checkpoint(folder)), theirs


@pytest.fixture
def certain() -> Iterator[None]:
    """Let the auto-encoder draw nothing: classic pipelines draw noise before they encode, and blocks after it."""
    with patch.object(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()):
        yield


@pytest.mark.usefixtures("certain")
@pytest.mark.parametrize("strength", [None, 0.6])
def test_pictures_are_those_of_diffusers(
    strength: float | None, sdxl_with: tuple[Checkpoint, Pipeline, Callable[[str], Any]]
) -> None:
    checkpoint, pipeline, theirs = sdxl_with
    said: dict[str, Any] = {"prompt": "a red circle", "num_inference_steps": 5}
    images = () if strength is None else (drawn(80, 48, seed=1),)
    more = {"num_pictures": len(images), "strength": strength}
    request = checkpoint.defaults.request(Size(width=80, height=48), seed=5, true_cfg_scale=5.0, **said, **more)
    *states, last = pipeline.states(request, pictures_of(images))
    assert len(states) == checkpoint.num_steps(request)
    name = "StableDiffusionXLImg2ImgPipeline" if images else "StableDiffusionXLPipeline"
    shown = {"image": images[0], "strength": strength} if images else {"width": 80, "height": 48}
    call = {**said, **shown, "guidance_scale": 5.0, "generator": torch.Generator().manual_seed(5)}
    expected = theirs(name)(**call, output_type="np").images
    pixels = pipeline.decoder.pixels(pipeline.sampler.latents(last)).movedim(1, -1).numpy()
    np.testing.assert_allclose(pixels, expected, rtol=0, atol=2e-3)
