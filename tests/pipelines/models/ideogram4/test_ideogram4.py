"""Ideogram 4 on gangs of Gloo ranks equals ``diffusers.Ideogram4Pipeline`` as users call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import Ideogram4Pipeline
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.ideogram4.spec import MAX_TOKENS, guidance_schedule
from pipelines.models.ideogram4.text import TEXT, hoisted
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import (
    CONTEXT,
    TOLERANCE,
    Case,
    denoised,
    encoded,
    request_of,
    without_exchange,
)
from tests.pipelines.support.checkpoints.tiny_others import ideogram4

TURBO = {"guidance_schedule": (7.0, 7.0, 7.0, 3.0), "mu": 0.5, "std": 1.75}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few steps": ({"num_inference_steps": 4}, TURBO),
    "one scale": (
        {"num_inference_steps": 4, "guidance_scale": 4.0},
        {**TURBO, "guidance_schedule": None, "guidance_scale": 4.0},
    ),
    "as it is published": ({"num_inference_steps": 48}, {}),
}
"""Changes of the request, and the arguments of diffusers' call besides the number of steps."""
STEADY = "few steps"


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(ideogram4)


def request(folder: Path, name: str) -> MediaRequest:
    return replace(request_of(Case(make=ideogram4), folder), **CASES[name][0])


@cache
def own(folder: Path, name: str, output_type: str = "latent") -> Any:
    return own_images(folder, name, request(folder, name), output_type)


def own_images(folder: Path, name: str, asked: MediaRequest, output_type: str = "latent") -> Any:
    pipeline = Ideogram4Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        asked.prompt,
        height=asked.height,
        width=asked.width,
        num_inference_steps=asked.num_inference_steps,
        generator=torch.Generator().manual_seed(asked.seed),
        output_type=output_type,
        **CASES[name][1],
    ).images


def packed(latents_BCHW: Tensor) -> Tensor:
    """Return the tokens of 2 x 2 latents, channels last in each, like diffusers' pipeline."""
    batch, channels, height, width = latents_BCHW.shape
    x_BCYPXQ = latents_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return x_BCYPXQ.permute(0, 2, 4, 3, 5, 1).reshape(batch, height * width // 4, 4 * channels)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_gives_the_pipelines_own(name: str, folder: Path) -> None:
    asked = request(folder, name)
    pipeline = load_pipeline(Checkpoint(folder))
    latents = pipeline.denoise(asked)
    assert own(folder, name).std() > 0.1
    assert relative_difference(packed(latents["latents"]), own(folder, name)) <= TOLERANCE
    if name == STEADY:
        pixels, expected = pipeline.decoder.decode(latents, asked), own(folder, name, "np")
        assert np.abs(pixels - np.round(expected * 255)).max() <= 1


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_gang_gives_the_pipelines_own(num_ranks: int, folder: Path) -> None:
    asked, expected = request(folder, STEADY), own(folder, STEADY)
    for strategy in (*CONTEXT, "tensor"):
        for latents in gang(num_ranks).run(denoised, folder, asked, strategy, encoded(folder, asked)):
            assert relative_difference(packed(latents), expected) <= TOLERANCE, strategy


def test_without_the_exchange_it_does_not(folder: Path) -> None:
    asked = request(folder, STEADY)
    for latents in gang(2).run(without_exchange, folder, asked, "ulysses", encoded(folder, asked)):
        assert relative_difference(packed(latents), own(folder, STEADY)) > 10 * TOLERANCE


def test_prompts_travel_without_padding(folder: Path) -> None:
    values = Checkpoint(folder).text_encoder().encode(request(folder, STEADY)).values
    assert values["text_features"].shape[1] == values["text_lengths"][0] < 100


def test_a_known_step_calls_both_transformers_with_features_of_the_text_alone(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    branches = checkpoint.denoiser().probe()
    assert [branch.module for branch in branches] == ["transformer", "unconditional_transformer"]
    num_text = branches[0].arguments["hidden_states"].shape[1] - branches[1].arguments["hidden_states"].shape[1]
    assert [branch.arguments["encoder_hidden_states"].shape[1] for branch in branches] == [num_text, 1]
    model = checkpoint.denoiser()
    lengths = [model.stream_lengths(branch.arguments)["tokens"] for branch in branches]
    assert lengths[0] > lengths[1]
    text_BTC = hoisted(model.modules["transformer"], branches[0].inputs)[TEXT]
    assert text_BTC[:, 0].numel() * MAX_TOKENS == model.hoisted_numbers, "the planner's count"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_text_is_projected_once_a_job_for_each_transformer(dtype: torch.dtype, folder: Path) -> None:
    """The encoder's features are float32."""
    checkpoint, asked = Checkpoint(folder, "cpu", dtype), request(folder, STEADY)
    model = checkpoint.denoiser()
    made = Mock(wraps=model.hoisted)
    engine = TorchEngine(replace(model, hoisted=made))
    made.reset_mock()
    latents = load_pipeline(checkpoint, engine).denoise(asked)
    assert made.call_count == len(model.modules) == 2
    if dtype is torch.float32:
        assert relative_difference(packed(latents["latents"]), own(folder, STEADY)) <= TOLERANCE


@pytest.mark.parametrize(
    ("num_steps", "scale", "last"),
    [(12, 7.0, [7.0, 3.0]), (20, 7.0, [7.0, 3.0, 3.0]), (48, 7.0, [7.0, 3.0, 3.0, 3.0]), (48, 5.0, [5.0, 5.0])],
)
def test_the_last_steps_of_a_preset_have_a_lower_scale(num_steps: int, scale: float, last: list[float]) -> None:
    scales = guidance_schedule(num_steps, scale)
    assert len(scales) == num_steps
    assert list(scales[-len(last) :]) == last
    assert set(scales[: -len(last)]) == {scale}
