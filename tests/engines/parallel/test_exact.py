"""Every strategy gives the unsharded module's answer on Gloo ranks; with its exchange broken it does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engines.core.spec import STRATEGIES as STRATEGY_NAMES
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import PARTS_FROM_TOKENS
from tests.engines.support import models
from tests.engines.support.gloo import gang

BOUND = 1e-5
FAMILIES, LENGTHS, SLOW = ("flux", "wan"), ("even", "uneven"), (pytest.mark.slow,)
STRATEGIES = ["ulysses", "ring", "allgather_kv", "tensor", "guidance"]
CASES = [
    *((strategy, num_ranks) for strategy, num_ranks in itertools.product(STRATEGIES, (1, 2, 4))),
    ("hybrid", 4),
    ("guidance2xulysses2", 4),
    ("guidance2xring2", 4),
    ("guidance2xtensor2", 4),
    ("ulysses2xtensor2", 4),
    ("ring2xtensor2", 4),
    ("allgather_kv2xulysses2", 4),
    ("guidance2xallgather_kv2", 4),
    ("pipeline", 2),
    ("pipeline", 4),
    ("guidance2xpipeline2", 4),
    ("pipeline2xulysses2", 4),
    ("pipeline2xtensor2", 4),
]


def with_models(cases: list[Any], lengths: tuple[str, ...]) -> list[Any]:
    """Return each case with both models and every length. Quick runs have both models in uneven lengths, and one of
    them, in turn, in even ones."""
    turns = itertools.product(enumerate(cases), enumerate(FAMILIES), lengths)
    return [
        pytest.param(*case, family, length, marks=SLOW if length == "even" and (number + place) % 2 else ())
        for (number, case), (place, family), length in turns
    ]


@pytest.mark.parametrize(("strategy", "num_ranks", "family", "length"), with_models(CASES, LENGTHS))
def test_equals_unsharded_module(strategy: str, num_ranks: int, family: str, length: str) -> None:
    answers = gang(4).run(predict, strategy, num_ranks, family, length, None)[:num_ranks]
    errors = [relative_difference(x, y) for x, y in zip(answers[0], reference(family, length), strict=True)]
    assert max(errors) <= BOUND
    for answer in answers[1:]:
        assert all(torch.equal(x, y) for x, y in zip(answer, answers[0], strict=True)), "ranks differ"


IN_PARTS = [("ulysses", 2), ("ulysses", 4), ("hybrid", 4)]


@pytest.mark.parametrize(("strategy", "num_ranks", "family", "length"), with_models(IN_PARTS, LENGTHS))
def test_heads_in_parts_too(strategy: str, num_ranks: int, family: str, length: str) -> None:
    test_equals_unsharded_module(f"{strategy} in parts", num_ranks, family, length)


EXCHANGES = {
    "ulysses.all_to_all": lambda x, axis: x,
    "ulysses.start_all_to_all": lambda x, axis: x.clone(),
    "strategies.start_rotation": lambda x, axis: x.clone(),
    "strategies.all_gather": lambda x, axis: torch.stack([x] * axis.size),
    "tensor.all_reduce_sum": lambda x, axis: x,
    "division.all_gather": lambda x, axis: torch.stack([x] * axis.size),
    "token_hooks.all_gather": lambda x, axis: torch.stack([x] * axis.size),
    "pipeline.broadcast": lambda x, axis, source: x,
    "pipeline.receive": lambda num, like, pair: like.new_zeros(num),
    "pipeline.start_send": lambda x, pair: x.clone(),
}
"""Replacements of each exchange, by its caller: silent no-ops of the right shape."""

BROKEN = [
    ("ulysses", "ulysses.all_to_all"),
    ("ulysses in parts", "ulysses.start_all_to_all"),
    ("ulysses", "token_hooks.all_gather"),
    ("ring", "strategies.start_rotation"),
    ("allgather_kv", "strategies.all_gather"),
    ("tensor", "tensor.all_reduce_sum"),
    ("guidance", "division.all_gather"),
    ("guidance", "ulysses.all_to_all"),
    ("hybrid", "ulysses.all_to_all"),
    ("hybrid", "strategies.start_rotation"),
    ("ulysses2xtensor2", "ulysses.all_to_all"),
    ("ulysses2xtensor2", "tensor.all_reduce_sum"),
    ("guidance2xring2", "strategies.start_rotation"),
    ("guidance2xtensor2", "tensor.all_reduce_sum"),
    ("guidance2xpipeline2", "division.all_gather"),
    ("ring2xtensor2", "strategies.start_rotation"),
    ("allgather_kv2xulysses2", "strategies.all_gather"),
    ("allgather_kv2xulysses2", "ulysses.all_to_all"),
    ("pipeline", "pipeline.broadcast"),
    ("pipeline2xulysses2", "pipeline.broadcast"),
    ("pipeline2xulysses2", "pipeline.receive+start_send"),
]


CONTROLS = [
    pytest.param(*broken, family, marks=SLOW if (number + place) % 2 else ())
    for (number, broken), (place, family) in itertools.product(enumerate(BROKEN), enumerate(FAMILIES))
]
"""Each broken exchange; quick runs have it with one of the models, in turn."""


@pytest.mark.parametrize(("strategy", "exchange", "family"), CONTROLS)
def test_control_with_an_exchange_left_out_fails(strategy: str, exchange: str, family: str) -> None:
    answers = gang(4).run(predict, strategy, 4, family, "uneven", exchange)
    errors = [relative_difference(x, y) for x, y in zip(answers[0], reference(family, "uneven"), strict=True)]
    assert max(errors) > 1000 * BOUND


def test_every_strategy_has_its_cases_and_its_controls() -> None:
    for strategy in STRATEGY_NAMES:
        assert {num_ranks for name, num_ranks in CASES if name == strategy} >= ({4} if strategy == "hybrid" else {2, 4})
        assert any(name == strategy for name, _ in BROKEN)


@cache
def reference(family: str, length: str) -> tuple[Tensor, ...]:
    """Return the answers of diffusers' own module and attention, in this process, in float32."""
    module = models.transformer(family)
    with torch.no_grad():
        every = (branch.inputs for branch in models.branches(family, length, num=2))
        return tuple(module(**inputs, return_dict=False)[0] for inputs in every)


def predict(strategy: str, num_ranks: int, family: str, length: str, broken: str | None) -> tuple[Tensor, ...]:
    rank = torch.distributed.get_rank()
    engine = engine_for(strategy, family)
    first = rank // num_ranks * num_ranks
    from_tokens = 1 if "in parts" in strategy else PARTS_FROM_TOKENS
    with left_out(broken), patch("engines.torch_engine.exchange.choose.PARTS_FROM_TOKENS", from_tokens):
        return engine.predict(models.branches(family, length, num=2), tuple(range(first, first + num_ranks)))


@contextmanager
def left_out(exchange: str | None) -> Iterator[None]:
    """Disable ``exchange``: "file.function", or both functions of a file: "file.one+other"."""
    with ExitStack() as stack:
        file, _, functions = (exchange or "").rpartition(".")
        for function in functions.split("+") if exchange else ():
            stack.enter_context(patch(f"engines.parallel.{file}.{function}", EXCHANGES[f"{file}.{function}"]))
        yield


@cache
def engine_for(strategy: str, family: str) -> TorchEngine:
    return TorchEngine(models.model(family), strategy=strategy.split()[0])
