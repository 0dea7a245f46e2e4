"""Predictions that a job keeps, for a step that makes no forwards."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engines.core.model import Branch
from engines.parallel.division import shape_of


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPredictions:
    """``predictions`` of one step, one for each of its branches, which ``calls`` tell apart."""

    calls: tuple[Hashable, ...]
    predictions: tuple[Tensor, ...]

    @classmethod
    def of(cls, branches: tuple[Branch, ...], predictions: tuple[Tensor, ...]) -> Self:
        return cls(calls=tuple(map(shape_of, branches)), predictions=predictions)

    def suit(self, branches: tuple[Branch, ...]) -> bool:
        """Returns whether ``branches`` are the same forwards: pipelines change transformers and guidance on the way."""
        return self.calls == tuple(map(shape_of, branches))
