"""The matrix of exports, and which of them run only in ``make test-slow``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engines.core.spec import ParallelSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3}
BLOCKS = {"flux": 2, "wan": 2}
PER_BLOCK = {
    "ulysses": {"all_to_all": 2},
    "allgather_kv": {"all_gather": 1},
    "hybrid": {"all_to_all": 3},
}
TENSOR_REDUCES = {"flux": 4 + 1, "wan": 2 * 7}
ATTENTIONS = {"flux": 2, "wan": 4}  # Wan: self and cross


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    family: str
    strategy: str
    num_ranks: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.family}-{self.strategy}{self.num_ranks}-{self.dtype}"

    @property
    def spec(self) -> ParallelSpec:
        return ParallelSpec.of(self.strategy, self.num_ranks)

    def collectives(self) -> dict[str, int]:
        """Return the collectives of graph and engine file: those of each block, and one gather of the prediction."""
        if self.strategy == "tensor":
            return {"all_reduce": TENSOR_REDUCES[self.family]}
        expected = {"all_gather": 1}
        for operation, number in PER_BLOCK[self.strategy].items():
            expected[operation] = expected.get(operation, 0) + number * BLOCKS[self.family]
        return expected


def _keys() -> list[Key]:
    families, strategies, team_sizes = ("flux", "wan"), ("ulysses", "allgather_kv", "hybrid", "tensor"), (2, 4)
    every = itertools.product(families, strategies, team_sizes, DTYPES)
    keys = [Key(family=f, strategy=s, num_ranks=w, dtype=d) for f, s, w, d in every]
    return [key for key in keys if (key.strategy, key.num_ranks) != ("hybrid", 2)]  # 2 ranks have one axis


_EVERY_RUN = {
    "flux-ulysses4-fp32", "flux-allgather_kv2-fp16", "wan-hybrid4-fp32", "wan-tensor4-fp16",
}  # fmt: skip
"""The trained models add Ulysses and AllGather-KV of Wan, and bfloat16."""

KEYS = _keys()
assert {str(key) for key in KEYS} >= _EVERY_RUN


def params(*, dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Any]:
    marks = {key: () if str(key) in _EVERY_RUN else (pytest.mark.slow,) for key in KEYS}
    return [pytest.param(key, id=str(key), marks=marks[key]) for key in KEYS if key.dtype in dtypes]


def for_targets() -> list[Any]:
    """Return each key with both targets; quick runs have one each, so that each precision and family meets both."""
    sm120 = {"flux-allgather_kv2-fp16", "wan-hybrid4-fp32"}
    cases = []
    for key, target in itertools.product(KEYS, ("sm89", "sm120")):
        in_every_run = str(key) in _EVERY_RUN and (target == "sm120") == (str(key) in sm120)
        cases.append(pytest.param(key, target, id=f"{key}-{target}", marks=() if in_every_run else (pytest.mark.slow,)))
    return cases
