"""Steps of three and four branches run on Gloo ranks: each part of a team takes some, and every rank gets all."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from tests.engines.parallel.test_exact import BOUND, left_out
from tests.engines.support import models
from tests.engines.support.gloo import gang

STRATEGIES = {
    2: ("guidance", "guidance4"),
    3: ("guidance3",),
    4: ("guidance4", "guidance2xulysses2", "guidance2xring2", "guidance2xtensor2", "guidance2xpipeline2"),
}
"""Strategies by number of ranks; "guidance4" runs two at once on two ranks."""
CASES = [
    pytest.param(num_ranks, num_branches, family, marks=() if num_branches + num_ranks == 7 else pytest.mark.slow)
    for num_ranks, num_branches, family in itertools.product(STRATEGIES, (3, 4), models.EVEN)
]
"""Every run has three branches on four ranks, and four on three."""


@pytest.mark.parametrize(("num_ranks", "num_branches", "family"), CASES)
def test_equals_unsharded_module(num_ranks: int, num_branches: int, family: str) -> None:
    answers = gang(num_ranks).run(predict, num_ranks, num_branches, family, None)
    for answer, strategy in itertools.product(answers, STRATEGIES[num_ranks]):
        errors = list(map(relative_difference, answer[strategy], reference(family, num_branches)))
        assert len(errors) == num_branches
        assert max(errors) <= BOUND, strategy
        assert all(map(torch.equal, answer[strategy], answers[0][strategy])), "ranks differ"


@pytest.mark.parametrize(("num_ranks", "num_branches"), [(2, 3), (3, 4), (4, 3), (4, 4)])
def test_control_with_the_exchange_left_out_fails(num_ranks: int, num_branches: int) -> None:
    for answer in gang(num_ranks).run(predict, num_ranks, num_branches, "flux", "division.all_gather"):
        for strategy in STRATEGIES[num_ranks]:
            errors = list(map(relative_difference, answer[strategy], reference("flux", num_branches)))
            assert max(errors) > 1000 * BOUND, strategy


@cache
def reference(family: str, num_branches: int) -> tuple[Tensor, ...]:
    """Return the answers of diffusers' own module and attention, in this process, in float32."""
    module = models.transformer(family)
    with torch.no_grad():
        every = models.branches(family, "uneven", num=num_branches)
        return tuple(module(**branch.inputs, return_dict=False)[0] for branch in every)


def predict(num_ranks: int, num_branches: int, family: str, broken: str | None) -> dict[str, tuple[Tensor, ...]]:
    branches, answers = models.branches(family, "uneven", num=num_branches), {}
    for strategy in STRATEGIES[num_ranks]:
        engine = TorchEngine(models.model(family), strategy=strategy)
        with left_out(broken):
            answers[strategy] = engine.predict(branches, tuple(range(num_ranks)))
        engine.close()
    return answers
