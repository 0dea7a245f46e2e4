"""Prompts of many lengths share a hand-ordered step that pads them, and give the model's own pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.model import Branch
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.heads import KeyMask
from engines.torch_engine.options import TorchOptions
from pipelines.checkpoint import Checkpoint
from pipelines.models.qwen_image.spec import PROMPT_WINDOW
from pipelines.run import PlainEngine, load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE, Case, request_of
from tests.pipelines.support.checkpoints import tiny_qwen
from tests.pipelines.support.checkpoints.first_steps import first_step
from tests.pipelines.support.references.own_call import own_latents

CASE = Case(make=tiny_qwen.qwen, changes={"negative_prompt": "not blue"})
"""Two branches, whose prompts differ in length."""
MAKERS = {"qwen": tiny_qwen.qwen, "qwen edit": tiny_qwen.qwen_edit}
STRATEGIES = [("ulysses", 2), ("ring", 2), ("allgather_kv", 2), ("hybrid", 4)]
BOUND = 1e-5
IN_ORDER = KeyMask.in_order


@pytest.fixture(scope="module")
def folder_of(folders: Callable[[Any], Path]) -> Callable[[str], Path]:
    return lambda name: folders(MAKERS[name])


def engine_of(checkpoint: Checkpoint, strategy: str = "ulysses", *, windows: bool = True) -> TorchEngine:
    return TorchEngine(
        checkpoint.denoiser(), strategy=strategy, fast=True, options=TorchOptions(prompt_windows=windows)
    )


def predicted(folder: Path, strategy: str = "ulysses") -> tuple[Tensor, ...]:
    ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    return engine_of(Checkpoint(folder), strategy).predict(first_step(folder), ranks)


def attending_to_all(folder: Path, strategy: str = "ulysses") -> tuple[Tensor, ...]:
    """Attend to the padding of prompts as well."""
    with patch.object(KeyMask, "in_order", lambda keys, kept_N: torch.ones_like(IN_ORDER(keys, kept_N))):
        return predicted(folder, strategy)


def differences(folder: Path, answers: tuple[Tensor, ...]) -> list[float]:
    expected = PlainEngine(model=Checkpoint(folder).denoiser()).predict(first_step(folder))
    return list(map(relative_difference, answers, expected))


@pytest.mark.parametrize("num_letters", [5, PROMPT_WINDOW])
def test_latents_equal_the_pipelines_own(num_letters: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen")
    request = replace(request_of(CASE, folder), prompt="a" * num_letters)
    checkpoint = Checkpoint(folder)
    latents = load_pipeline(checkpoint, engine_of(checkpoint)).denoise(request)["latents"]
    assert relative_difference(latents, own_latents(folder, request)) <= TOLERANCE


@pytest.mark.parametrize("name", MAKERS)
def test_one_rank_equals_the_module(name: str, folder_of: Callable[[str], Path]) -> None:
    assert max(differences(folder_of(name), predicted(folder_of(name)))) <= BOUND
    assert min(differences(folder_of(name), attending_to_all(folder_of(name)))) > 100 * BOUND


@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
def test_ranks_equal_the_module(strategy: str, num_ranks: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen edit")
    for answers in gang(num_ranks).run(predicted, folder, strategy):
        assert max(differences(folder, answers)) <= BOUND


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_ranks_that_attend_to_all_do_not(strategy: str, folder_of: Callable[[str], Path]) -> None:
    for answers in gang(2).run(attending_to_all, folder_of("qwen"), strategy):
        assert min(differences(folder_of("qwen"), answers)) > 100 * BOUND


@pytest.mark.parametrize("windows", [True, False])
def test_prompts_within_a_window_share_a_step(windows: bool, folder_of: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(folder_of("qwen"))
    engine, sampler, encoder = engine_of(checkpoint, windows=windows), checkpoint.sampler(), checkpoint.text_encoder()

    def first_branch(num_letters: int) -> Branch:
        request = replace(request_of(CASE, checkpoint.path), prompt="a" * num_letters)
        return sampler.branches(sampler.begin(request, encoder.encode(request)))[0]

    def is_warm(num_letters: int) -> bool:
        engine.predict((first_branch(num_letters),), (0,))
        return engine.was_warm

    last = 1 + -first_branch(1).inputs["encoder_hidden_states"].shape[1] % PROMPT_WINDOW
    assert not is_warm(1)
    assert is_warm(1)
    assert is_warm(last) is windows
    assert not is_warm(last + 1)


@pytest.mark.parametrize("fills_prompts", [True, False])
def test_a_gang_prepares_short_prompts_beside_the_longest(
    fills_prompts: bool, folder_of: Callable[[str], Path]
) -> None:
    checkpoint, sizes = Checkpoint(folder_of("qwen")), [Size(width=48, height=32)]
    steps = checkpoint.first_steps(sizes, ["transformer"], fills_prompts=fills_prompts)
    lengths = [step[0].inputs["encoder_hidden_states"].shape[1] for step in steps]
    short = [PROMPT_WINDOW, 2 * PROMPT_WINDOW] if fills_prompts else []
    assert lengths == [checkpoint.defaults.max_tokens, *short]
