"""Prompts of several lengths are steps of one shape if the model pads them, and give its own pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.parallel.division import shape_of
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.z_image.spec import SPEC
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.pipelines.models.test_gangs import TOLERANCE, Case, request_of
from tests.pipelines.support.checkpoints import tiny_models
from tests.pipelines.support.references.own_call import own_latents

WINDOW = 32
MOST = WINDOW - 1
"""Letters in one window: a token each, and one end token."""
CASE = Case(make=tiny_models.z_image, changes={"true_cfg_scale": 3.0})


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


def latents_of(folder: Path, num_letters: int, *, fast: bool | None) -> Tensor:
    checkpoint = Checkpoint(folder)
    pipeline = load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy="ulysses", fast=fast))
    *_, last = pipeline.states(replace(request_of(CASE, folder), prompt="a" * num_letters))
    latents: Tensor = pipeline.sampler.latents(last)["latents"]
    return latents


@pytest.mark.parametrize("num_letters", [5, MOST, MOST + 1])
@pytest.mark.parametrize("fast", [False, True], ids=["module", "hand-ordered"])
def test_latents_equal_the_pipelines_own(folder: Path, num_letters: int, fast: bool) -> None:
    expected = own_latents(folder, replace(request_of(CASE, folder), prompt="a" * num_letters))
    assert relative_difference(latents_of(folder, num_letters, fast=fast), expected) <= TOLERANCE


@pytest.mark.parametrize("fast", [False, True], ids=["module", "hand-ordered"])
def test_what_fills_a_prompt_up_is_what_the_model_fills_it_up_with(folder: Path, fast: bool) -> None:
    """The embedder's own output for padding gives another picture."""
    expected = own_latents(folder, replace(request_of(CASE, folder), prompt="a" * 5))
    nothing = patch("pipelines.models.z_image.text.padding_mask", none_filled)
    with nothing, patch("pipelines.models.z_image.fast.padding_mask", none_filled):
        assert relative_difference(latents_of(folder, 5, fast=fast), expected) > 10 * TOLERANCE


def none_filled(text_TD: Tensor) -> Tensor:
    return torch.zeros_like(text_TD[:, 0], dtype=torch.bool)


def test_prompts_within_a_window_have_steps_of_one_shape(folder: Path) -> None:
    sampler, encoder = Checkpoint(folder).sampler(), Checkpoint(folder).text_encoder()

    def shape(num_letters: int) -> Any:
        request = replace(request_of(CASE, folder), prompt="a" * num_letters)
        return shape_of(sampler.branches(sampler.begin(request, encoder.encode(request)))[0])

    assert shape(1) == shape(20) == shape(MOST) != shape(MOST + 1)


def test_a_gang_prepares_a_short_prompt_beside_the_longest(folder: Path) -> None:
    checkpoint, size = Checkpoint(folder), Size(width=48, height=32)
    longest, short = (branches[0].inputs["cap_feats.0"] for branches in checkpoint.first_steps([size], ["transformer"]))
    assert longest.shape[0] > short.shape[0] == 2 * WINDOW


def test_it_is_done_once_a_job(folder: Path) -> None:
    """Engines recognise the text from step to step."""
    pipeline = load_pipeline(Checkpoint(folder))
    first, second, *_ = pipeline.states(request_of(CASE, folder))
    texts = [pipeline.sampler.branches(state)[0].inputs["cap_feats.0"] for state in (first, second)]
    assert texts[0] is texts[1]


def test_prompts_alone_are_filled_up() -> None:
    values: Mapping[str, Any] = {"prompt_embeds": [torch.ones(3, 2)], "image_latents": torch.ones(3, 2)}
    filled = SPEC.pad_conditioning(values)
    assert filled["prompt_embeds"][0].shape == (WINDOW, 2)
    assert filled["image_latents"] is values["image_latents"]
