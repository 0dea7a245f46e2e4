"""Eight ranks, on Gloo: the widest gang of one host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang


@pytest.mark.parametrize("family", ["flux", pytest.param("wan", marks=pytest.mark.slow)])
def test_every_strategy_and_products_of_three(family: str) -> None:
    by_rank = gang(8).run(predict, family)
    branches = models.branches(family, "uneven", num=2)
    expected = TorchEngine(models.model(family)).predict(branches, (0,))
    for rank in range(8):
        for strategy, answer in by_rank[rank].items():
            errors = list(map(relative_difference, answer, expected))
            assert max(errors) <= 1e-5, (rank, strategy)
            assert all(torch.equal(x, y) for x, y in zip(answer, by_rank[0][strategy], strict=True))


STRATEGIES = (
    "ulysses",
    "ring",
    "allgather_kv",
    "tensor",
    "guidance",
    "hybrid",
    "ulysses2xring4",
    "guidance2xulysses2xtensor2",
    "allgather_kv4xulysses2",
    "guidance2xpipeline4",
)


def predict(family: str) -> dict[str, tuple[Tensor, ...]]:
    assert dist.get_world_size() == 8
    answers = {}
    for strategy in STRATEGIES:
        engine = TorchEngine(models.model(family), strategy=strategy)
        answers[strategy] = engine.predict(models.branches(family, "uneven", num=2), tuple(range(8)))
        engine.close()
    return answers
