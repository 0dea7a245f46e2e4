from typing import Any

import pytest

from engines.core.spec import ParallelSpec
from engines.parallel.pipeline import stage_bounds
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang


@pytest.mark.parametrize(
    ("weights", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
        ([4, 1, 1, 1, 1], 2, [(0, 1), (1, 5)]),
        ([2] * 19 + [1] * 38, 4, [(0, 9), (9, 19), (19, 38), (38, 57)]),
        ([9, 1, 1], 3, [(0, 1), (1, 2), (2, 3)]),
        ([1, 1, 9], 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_stages_weigh_the_same(weights: list[int], num_stages: int, expected: list[tuple[int, int]]) -> None:
    assert stage_bounds(weights, num_stages) == expected


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ValueError, match="pipeline 4 does not fit: the model can be cut into 2 blocks"):
        ParallelSpec(pipeline=4).check(num_heads=8, num_blocks=2)
    with pytest.raises(ValueError, match="can be cut into 0 blocks"):
        ParallelSpec(pipeline=2).check(num_heads=8, num_blocks=0)


def test_each_stage_runs_its_blocks_once_a_branch() -> None:
    """Four blocks (the first heavier than two of the last) on two stages: no block runs on both."""
    counts = gang(2).run(count_block_runs)
    assert counts == [[3, 0, 0, 0], [0, 3, 3, 3]]


def count_block_runs() -> list[int]:
    engine = TorchEngine(models.model("flux"), strategy="pipeline")
    branches = models.branches("flux", "even", num=3)
    engine.predict(branches, (0, 1))
    module: Any = engine._sharded.module("transformer", engine.division.team((0, 1)))
    blocks = [*module.transformer_blocks, *module.single_transformer_blocks]
    counts = [0] * len(blocks)
    for number, block in enumerate(blocks):
        block.attn.register_forward_pre_hook(
            lambda _m, _a, number=number: counts.__setitem__(number, counts[number] + 1)
        )
    engine.predict(branches, (0, 1))
    return counts
