"""Predictions that a later step without forwards reuses."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engines.core.model import Branch
from engines.parallel.division import shape_of


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPredictions:
    """Predictions of one step, one per branch; ``calls`` are the branches' shapes."""

    calls: tuple[Hashable, ...]
    predictions: tuple[Tensor, ...]

    @classmethod
    def of(cls, branches: tuple[Branch, ...], predictions: tuple[Tensor, ...]) -> Self:
        return cls(calls=tuple(map(shape_of, branches)), predictions=predictions)

    def suit(self, branches: tuple[Branch, ...]) -> bool:
        """Return whether ``branches`` are the same forwards: transformers and guidance may change during a job."""
        return self.calls == tuple(map(shape_of, branches))
