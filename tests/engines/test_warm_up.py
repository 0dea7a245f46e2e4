"""The warm-up at start makes the expected shapes warm for the first job, on every team, and no others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core.engine import RankContext
from engines.core.model import with_attention
from engines.planner.profile import rough_flops
from engines.torch_engine import engine as engine_module
from engines.torch_engine import steps
from engines.torch_engine.config import resolve
from engines.torch_engine.engine import TorchEngine
from engines.warm_up import release_unused_memory, warm_up
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.test_steps import Recording


@pytest.mark.parametrize("strategy", ["ulysses", "guidance", "pipeline"])
def test_the_first_step_of_a_prepared_shape_is_warm(strategy: str) -> None:
    for warm in gang(4).run(warm_and_predict, strategy):
        assert warm == {"4 even": True, "2 even": True, "1 even": False, "4 uneven": False, "4 uneven again": True}


def test_a_shape_that_is_not_captured_runs_once() -> None:
    """A further precision of attention is a shape of its own, and costs one more step."""
    model = models.model("wan")
    forwards: list[str] = []

    def forward(module: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
        forwards.append("")
        return model.forward(module, arguments)

    engine = TorchEngine(replace(model, forward=forward))
    steps = [with_attention(models.branches("wan", "even"), one) for one in ("", "fp8")]
    warm_up(engine, steps, RankContext(rank=0, num_ranks=1, device="cpu"), (1,))
    assert len(forwards) == 2
    for step in steps:
        engine.predict(step, (0,))
        assert engine.was_warm
    engine.close()


@pytest.mark.parametrize(
    ("strategy", "num_short", "num_runs", "by_rank"),
    [
        ("guidance", 1, 2, [0, 1]),
        ("guidance", 0, 1, [0, 0]),
        ("ulysses", 2, 2, [2, 2]),
        ("ulysses", 1, 2, [1, 1]),
        ("ulysses", 0, 1, [0, 0]),
        ("pipeline", 2, 1, [0, 0]),
    ],
)
def test_ranks_agree_on_long_branches(strategy: str, num_short: int, num_runs: int, by_rank: list[int]) -> None:
    """The second branch has fewer tokens. With guidance, each rank runs one of the two, and both make equal steps."""
    each = [rough_flops(models.model("flux"), branch) for branch in models.branches("flux", "even", num=2)]
    limit = {2: 2 * each[0], 1: sum(each) / 2, 0: each[1] / 2}[num_short] / (1 if strategy == "guidance" else 2)
    found = gang(2).run(warm_up_of_two, strategy, limit)
    assert found == [(num_runs, num_captured, True) for num_captured in by_rank]


def warm_up_of_two(strategy: str, max_flops: float) -> tuple[int, int, bool]:
    """Return the runs and graphs of a warm-up, and whether the next step is warm."""
    step, ranks, own = models.branches("flux", "even", num=2), (0, 1), resolve
    with (
        patch.object(engine_module, "resolve", lambda *args, **how: replace(own(*args, **how), capture=True)),
        patch.multiple(steps, GraphPool=Mock(), CapturedStep=Recording, MAX_CAPTURED_FLOPS=max_flops),
        closing(TorchEngine(models.model("flux"), strategy=strategy, fast=False)) as engine,
    ):
        with patch.object(engine, "predict", wraps=engine.predict) as predict:
            engine.warm_up(step, ranks)
        num_captured = engine.num_captured
        engine.predict(step, ranks)
        return predict.call_count, num_captured, engine.was_warm


def test_memory_of_the_warm_up_is_released_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The allocator of a fake GPU holds 3 of 10 bytes unused."""
    reserved = [10]
    pretended = {
        "device": lambda _: nullcontext(),
        "max_memory_reserved": lambda: 12,
        "empty_cache": lambda: reserved.append(7),
        "memory_reserved": lambda: reserved[-1],
        "memory_allocated": lambda: 6,
        "mem_get_info": lambda: (100, 200),
    }
    for name, function in pretended.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with caplog.at_level(logging.INFO, "engines.warm_up"):
        release_unused_memory("cpu")
        assert not caplog.records
        release_unused_memory("cuda:0")
    (record,) = caplog.records
    fields = ("held_bytes", "most_bytes", "tensor_bytes", "free_bytes")
    assert [getattr(record, name) for name in fields] == [7, 12, 6, 100]


def warm_and_predict(strategy: str) -> dict[str, bool]:
    """Return which steps are warm after a warm-up of even lengths for teams of 4 and 2."""
    rank = dist.get_rank()
    engine = TorchEngine(models.model("wan"), strategy=strategy)
    context = RankContext(rank=rank, num_ranks=4, device="cpu")
    warm_up(engine, [models.branches("wan", "even", num=2)], context, (2, 4))

    def was_warm(num_ranks: int, length: str) -> bool:
        first = rank // num_ranks * num_ranks
        engine.predict(models.branches("wan", length, num=2, seed=8), tuple(range(first, first + num_ranks)))
        return engine.was_warm

    found = {f"{num_ranks} even": was_warm(num_ranks, "even") for num_ranks in (4, 2, 1)}
    found |= {"4 uneven": was_warm(4, "uneven"), "4 uneven again": was_warm(4, "uneven")}
    engine.close()
    return found
