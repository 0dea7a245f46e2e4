"""Median and spread of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Values in the unit of the measurement."""

    median: float
    lowest: float
    highest: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values), num=len(values))

    def rounded(self, digits: int = 3) -> dict[str, float]:
        return {name: round(value, digits) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f}, {self.num}x)"
