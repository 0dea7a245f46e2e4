"""FLUX.3 on gangs of Gloo ranks equals the pipeline's own call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.core.model import Branch
from engines.core.shard_plan import named_like
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.flux3.fast import FastFlux3, Flux3Weights
from pipelines.models.flux3.spec import SHARD_PLAN
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints.first_steps import first_step
from tests.pipelines.support.checkpoints.tiny_flux3 import (
    LOAD_PROCESSOR,
    Flux3Processor,
    encode_as_given,
    flux3,
    flux3_distilled,
)
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.picture_cases import PictureCase, images_of, pictures_of, request_of
from tests.pipelines.support.references.video import denoised_from

TWO = ((40, 48), (50, 34))
CASES = {
    "two pictures": PictureCase(make=flux3, pictures=TWO, changes={"true_cfg_scale": 1.0}),
    "words": PictureCase(make=flux3, pictures=()),
    "distilled": PictureCase(make=flux3_distilled, pictures=()),
    "distilled, one picture": PictureCase(make=flux3_distilled, pictures=TWO[1:]),
}
SOME, *OTHERS = CASES
ALL = [SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
STRATEGIES = {
    1: ("ulysses",),
    2: (*CONTEXT, "tensor", "guidance"),
    4: (*CONTEXT, "hybrid", "tensor", "tensor2xulysses2"),
}


def loaded(folder: Path, *, fast: bool | None = None) -> Pipeline:
    checkpoint = Checkpoint(folder)
    with patch(LOAD_PROCESSOR, lambda *_, **__: Flux3Processor()):
        return load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy="ulysses", fast=fast))


@cache
def encoded(folder: Path, name: str) -> bytes:
    """Return the pickled conditioning, made once in a process: strategies differ only after it."""
    pictures, request = pictures_of(CASES[name]), request_of(CASES[name], folder)
    with patch(LOAD_PROCESSOR, lambda *_, **__: Flux3Processor()):
        return pickle.dumps(Checkpoint(folder).text_encoder().encode(request, pictures))


def denoised(folder: Path, name: str, strategy: str, conditioning: bytes) -> Tensor:
    values = denoised_from(folder, request_of(CASES[name], folder), conditioning, strategy)
    latents: Tensor = values["latents"]
    return latents


def without_exchange(folder: Path, name: str, conditioning: bytes) -> Tensor:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised(folder, name, "ulysses", conditioning)


def unaware(folder: Path, name: str, conditioning: bytes) -> Tensor:
    """Let blocks of one stream take its padding for tokens, as if all streams were there."""
    with patch("engines.core.layout.TokenLayout.of_stream", lambda layout, stream: layout):
        return denoised(folder, name, "ulysses", conditioning)


@cache
def own_latents(folder: Path, name: str, request: MediaRequest | None = None) -> Tensor:
    images, request = images_of(CASES[name]), request or request_of(CASES[name], folder)
    with patch(LOAD_PROCESSOR, lambda *_, **__: Flux3Processor()):
        state = own_state(folder, request, change=encode_as_given, image=images or None)
    latents: Tensor = state.get("latents")
    assert latents.std() > 0.1
    return latents


QUICK = {(1, "ulysses"), (2, "ring"), (2, "guidance"), (4, "ulysses"), (4, "hybrid"), (4, "tensor2xulysses2")}
"""Each way to divide it, once; slow tests have the others that divide tokens."""
TEAMS = [
    pytest.param(num_ranks, strategy, marks=[] if (num_ranks, strategy) in QUICK else [pytest.mark.slow])
    for num_ranks, several in STRATEGIES.items()
    for strategy in several
]


@pytest.mark.parametrize(("num_ranks", "strategy"), TEAMS)
@pytest.mark.parametrize("name", ALL)
def test_latents_equal_the_pipelines_own(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path]
) -> None:
    folder = folders(CASES[name].make)
    for latents in gang(num_ranks).run(denoised, folder, name, strategy, encoded(folder, name)):
        assert relative_difference(latents, own_latents(folder, name)) <= TOLERANCE


@pytest.mark.parametrize(("name", "num_branches"), [("words", 2), ("distilled, one picture", 1)])
def test_hand_ordered_steps_make_the_same(name: str, num_branches: int, folders: Callable[[Any], Path]) -> None:
    """Constant inputs and the modulation of all steps are computed once a job.

    In the distilled model it also depends on the time that each step leads to.
    """
    folder, owners = folders(CASES[name].make), ((FastFlux3, "hoisted"), (Flux3Weights, "scheduled"))
    pipeline, request = loaded(folder, fast=True), request_of(CASES[name], folder)
    with ExitStack() as stack:
        watched = (patch.object(*one, autospec=True, side_effect=getattr(*one)) for one in owners)
        calls = [stack.enter_context(each) for each in watched]
        *_, last = pipeline.states(request, pictures_of(CASES[name]))
    assert relative_difference(pipeline.sampler.latents(last)["latents"], own_latents(folder, name)) <= TOLERANCE
    assert [one.call_count for one in calls] == [num_branches] * 2


@torch.no_grad()
def test_entries_of_a_batch_have_times_of_their_own(folders: Callable[[Any], Path]) -> None:
    folder = folders(flux3_distilled)
    model, (branch, *_) = Checkpoint(folder).denoiser(), first_step(folder, 1)
    times = {"timestep": torch.tensor([0.8, 0.3]), "target_timestep": torch.tensor([0.5, 0.1])}
    batched = {name: torch.randn(2, *x.shape[1:]) for name, x in branch.inputs.items() if x.ndim == 3}
    inputs = {**branch.inputs, **batched, **times}
    expected = model.modules["transformer"](**inputs, return_dict=False)[0]
    (answer,) = TorchEngine(model, fast=True).predict((Branch(inputs=inputs),), (0,))
    assert len(batched) == 3
    assert relative_difference(answer, expected) <= TOLERANCE / 10


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_the_exchange_they_do_not(num_ranks: int, folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[SOME].make)
    for latents in gang(num_ranks).run(without_exchange, folder, SOME, encoded(folder, SOME)):
        assert relative_difference(latents, own_latents(folder, SOME)) > 10 * TOLERANCE


def test_nor_where_blocks_of_one_stream_do_not_know_its_padding(folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[SOME].make)
    for latents in gang(4).run(unaware, folder, SOME, encoded(folder, SOME)):
        assert relative_difference(latents, own_latents(folder, SOME)) > 10 * TOLERANCE


def test_the_picture_has_the_size_asked_for(folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[SOME].make)
    pipeline, request = loaded(folder), request_of(CASES[SOME], folder)
    *_, middle, last = pipeline.states(request, pictures_of(CASES[SOME]))
    for latents in (pipeline.sampler.preview(middle), pipeline.sampler.latents(last)):
        frames = pipeline.decoder.decode(latents, request)
        assert (frames.shape, frames.dtype) == ((1, request.height, request.width, 3), np.dtype(np.uint8))


@pytest.mark.parametrize("make", [flux3, pytest.param(flux3_distilled, marks=pytest.mark.slow)])
def test_a_known_step_checks_a_gang(make: Callable[[Path], Path], folders: Callable[[Any], Path]) -> None:
    model = Checkpoint(folders(make)).denoiser()
    branches = model.probe()
    assert len(branches) == 2
    assert any(number % 4 for number in model.stream_lengths(branches[0].arguments).values())


def test_the_plan_covers_the_published_size() -> None:
    from diffusers import Flux3Transformer2DModel

    with torch.device("meta"):
        module = Flux3Transformer2DModel()
    names = [name for name, _ in module.named_modules()]
    assert all(any(rule.matches(name) for name in names) for rule in SHARD_PLAN.linears)
    assert len(SHARD_PLAN.blocks_of(module)) == 3 * 5 + 28
    for name in (*(gather.module for gather in SHARD_PLAN.gathers), *(name for name, _ in SHARD_PLAN.alone)):
        assert named_like(module, name)
