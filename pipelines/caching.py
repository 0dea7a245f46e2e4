"""Steps that skip their forwards and reuse the previous prediction, chosen by the number of steps alone.

Predictions change much in the first steps and little later (benchmarks/reports/step_cache_2cpu_2026-11-25.md). A later
step may reuse the previous prediction. The pattern is fixed as in FORA (Selvaraju et al. 2024, arXiv:2407.01425). Only
the last layer is cached, as in TaylorSeer's lite form (Liu et al. 2025, arXiv:2503.06923) at order 0. The pattern
depends on numbers only, so all ranks of a gang agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

CacheMode = Literal["off", "conservative", "fast"]

MIN_STEPS = 10
"""With fewer steps, consecutive predictions differ too much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePattern:
    """Pattern of computed steps. The last step is always computed."""

    first_share: float
    """Share of the steps, from the first, that are all computed."""
    num_skipped: int
    """Skipped steps before each computed one after that."""

    def computes(self, step: int, num_steps: int) -> bool:
        """Return whether ``step``, counted from 0, makes forwards."""
        after_first = step - math.ceil(self.first_share * num_steps)
        is_in_turn = after_first % (self.num_skipped + 1) == self.num_skipped
        return after_first < 0 or is_in_turn or step == num_steps - 1


PATTERNS: Mapping[CacheMode, CachePattern] = {
    "conservative": CachePattern(first_share=0.4, num_skipped=1),
    "fast": CachePattern(first_share=0.3, num_skipped=3),
}


def computed_steps(mode: CacheMode, num_steps: int) -> tuple[bool, ...]:
    """Return, for each of ``num_steps``, whether it makes forwards. ValueError for too few steps."""
    if mode == "off":
        return (True,) * num_steps
    if num_steps < MIN_STEPS:
        raise ValueError(
            f"cache is {mode!r}, which needs {MIN_STEPS} steps or more, and num_inference_steps is {num_steps}; "
            "ask for more steps, or set cache to off"
        )
    return tuple(PATTERNS[mode].computes(step, num_steps) for step in range(num_steps))


def control_changes(begin: float | None, end: float | None, num_steps: int) -> Iterator[int]:
    """Yield the steps whose control differs from that of the step before them, by diffusers' rule.

    The control counts from the share ``begin`` of the steps up to ``end``; None: from the first, to the last.
    """
    first, last = begin or 0.0, 1.0 if end is None else end
    is_controlled = [first <= step / num_steps and (step + 1) / num_steps <= last for step in range(num_steps)]
    yield from (step for step, (before, now) in enumerate(pairwise(is_controlled), 1) if before != now)
