"""Estimated step times by tokens. Free of torch, for the process that owns the ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimates:
    """Step times at growing numbers of tokens. ValueError if there are fewer than two."""

    tokens: tuple[int, ...]
    """Tokens of all streams together."""
    by_size: Mapping[int, tuple[tuple[float, ...], ...]]
    """Seconds by team size, then by number of branches (first 1), then by entry of ``tokens``."""

    def __post_init__(self) -> None:
        times = [times_s for by_branches in self.by_size.values() for times_s in by_branches]
        if len(self.tokens) < 2 or not times or any(len(times_s) != len(self.tokens) for times_s in times):
            raise ValueError(f"steps are estimated at two numbers of tokens or more, not at {self.tokens}, by {times}")

    def step_s(self, num_tokens: float, num_branches: int) -> dict[int, float]:
        """Return seconds by team size: a power law of tokens, linear beyond the estimated numbers of branches."""
        steps_s = {}
        for size, times in self.by_size.items():
            estimated = min(num_branches, len(times))
            steps_s[size] = num_branches / estimated * self._at(num_tokens, times[estimated - 1])
        return steps_s

    def _at(self, num_tokens: float, times_s: tuple[float, ...]) -> float:
        right = min(max(bisect_left(self.tokens, num_tokens), 1), len(self.tokens) - 1)
        left = right - 1
        share = math.log(max(1.0, num_tokens) / self.tokens[left]) / math.log(self.tokens[right] / self.tokens[left])
        return float(times_s[left] * (times_s[right] / times_s[left]) ** share)

    def to_document(self) -> dict[str, Any]:
        """Return a JSON document that ``of_document`` reads."""
        return {"tokens": self.tokens, "by_size": {str(size): times for size, times in self.by_size.items()}}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> StepEstimates:
        """Read a document of ``to_document``. Any other raises ValueError, TypeError, KeyError or AttributeError."""
        by_size = {
            int(size): tuple(tuple(float(step_s) for step_s in times_s) for times_s in by_branches)
            for size, by_branches in document["by_size"].items()
        }
        return cls(tokens=tuple(int(number) for number in document["tokens"]), by_size=by_size)
