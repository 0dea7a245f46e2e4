"""The fast path gives the module's own answer, alone and on Gloo ranks, and the module still works."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engines.core.layout import TokenLayout
from engines.core.model import LATENTS, Precision
from engines.core.spec import ParallelSpec
from engines.core.tensors import relative_difference
from engines.parallel.mesh import Groups, Team, Teams, team_of_one
from engines.torch_engine.fast_step import FastStep
from engines.torch_engine.hoisted import HoistedCache
from pipelines.models.flux.fast import FluxWeights
from pipelines.models.flux.spec import SHARD_PLAN, SPEC
from tests.engines.support import models
from tests.engines.support.gloo import gang

BOUND = 1e-5


@cache
def reference(length: str) -> Tensor:
    (branch,) = models.branches("flux", length)
    with torch.no_grad():
        prediction: Tensor = models.transformer("flux")(**branch.inputs, return_dict=False)[0]
    return prediction


@cache
def weights(precision: Precision = "native") -> Any:
    return FluxWeights(models.transformer("flux"), precision)


def step(team: Team, length: str, precision: Precision = "native") -> Tensor:
    (branch,) = models.branches("flux", length)
    layout = TokenLayout.of(SHARD_PLAN.streams, SPEC.stream_lengths({}, branch.inputs), team.context.size)
    fast = FastStep(weights(precision), team, layout, latents=branch.inputs[LATENTS])
    with torch.no_grad():
        return fast(fast.tokens(branch.inputs[LATENTS]), HoistedCache().step_tensors(branch, weights(precision), fast))


STRATEGIES = [("ulysses", 2), ("ulysses", 4), ("ring", 2), ("allgather_kv", 4), ("hybrid", 4)]


@cache
def teams() -> Teams:
    specs = [ParallelSpec.of(strategy, width) for strategy, width in STRATEGIES]
    return Teams(rank=torch.distributed.get_rank(), num_ranks=4, specs=specs, groups=Groups.of_gang())


def rank_step(strategy: str, width: int, length: str, break_exchange: bool = False) -> Tensor | None:
    ranks = tuple(range(width))
    if torch.distributed.get_rank() >= width:
        teams()
        return None
    team = teams().team(ranks, ParallelSpec.of(strategy, width))
    if not break_exchange:
        return step(team, length)
    with patch("engines.torch_engine.exchange.heads.start_all_to_all", lambda x, axis: x.clone()):
        return step(team, length)


@pytest.mark.parametrize("length", ["even", "uneven"])
def test_one_rank_equals_the_module(length: str) -> None:
    assert relative_difference(step(team_of_one(), length), reference(length)) <= BOUND


@pytest.mark.parametrize("length", ["even", "uneven"])
@pytest.mark.parametrize(("strategy", "width"), STRATEGIES)
def test_ranks_equal_the_module(strategy: str, width: int, length: str) -> None:
    answers = gang(4).run(rank_step, strategy, width, length)[:width]
    assert relative_difference(answers[0], reference(length)) <= BOUND
    assert all(torch.equal(answer, answers[0]) for answer in answers[1:])


def test_a_broken_exchange_shows() -> None:
    answers = gang(4).run(rank_step, "ulysses", 4, "even", True)
    assert relative_difference(answers[0], reference("even")) > 1e-2


def test_a_broken_block_shows() -> None:
    """A swapped shift and scale in one block would exceed the bound."""
    broken = FluxWeights(models.transformer("flux"), "native")
    block = broken.module.single_transformer_blocks[1].norm.linear
    block.bias.data = block.bias.data.unflatten(0, (3, -1))[[1, 0, 2]].flatten()
    with patch(f"{__name__}.weights", lambda precision: broken):
        assert relative_difference(step(team_of_one(), "even"), reference("even")) > 100 * BOUND


def test_fp8_is_close() -> None:
    error = relative_difference(step(team_of_one(), "even", "fp8"), reference("even"))
    assert 1e-4 < error < 0.1


def test_the_module_still_works_and_shares_its_weights() -> None:
    module = models.transformer("flux")
    before = copy.deepcopy(module)
    arranged = FluxWeights(module, "native")
    (branch,) = models.branches("flux", "even")
    with torch.no_grad():
        torch.testing.assert_close(module(**branch.inputs)[0], before(**branch.inputs)[0])
    attn = module.transformer_blocks[0].attn
    gemm: Any = arranged.blocks.duals[0].qkv.latents
    assert gemm.weight_NK.data_ptr() == attn.to_q.weight.data_ptr()
    assert attn.to_k.weight.untyped_storage().data_ptr() == attn.to_q.weight.untyped_storage().data_ptr()
