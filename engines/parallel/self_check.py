"""One known step on every team of a gang, compared with the same step on one rank. A wrong answer is an error.

Collectives inside an engine are known to have become silent no-ops elsewhere, and a picture made so still looks like a
picture at a glance.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from engines.engine import Engine
from engines.model import Branch

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Relative error (2-norm) that rounding explains, by dtype of the prediction; a missing exchange costs far more."""


class WrongAnswerError(RuntimeError):
    """Ranks that work together give another answer than one rank alone. Nothing that they make can be trusted."""

    def __init__(self, ranks: tuple[int, ...], strategy: str, difference: float, allowed: float) -> None:
        super().__init__(ranks, strategy, difference, allowed)
        self.ranks, self.strategy, self.difference, self.allowed = ranks, strategy, difference, allowed

    def __str__(self) -> str:
        return (
            f"ranks {self.ranks} with strategy {self.strategy} differ from one rank alone by {self.difference:.2g} "
            f"(relative; {self.allowed:.2g} is allowed): an exchange between them does not work"
        )


def self_check(
    engine: Engine, branches: tuple[Branch, ...], *, rank: int, teams: Iterable[tuple[tuple[int, ...], str]]
) -> dict[str, float]:
    """Run ``branches`` (one alone, and all together) on every team of the caller; ``teams`` are (ranks, strategy).

    Returns the relative difference per team. Raises ``WrongAnswerError``. Every rank of the gang calls it with its own
    teams, in the same order.
    """
    alone = engine.predict(branches, (rank,))
    differences: dict[str, float] = {}
    for ranks, strategy in teams:
        for num in sorted({1, len(branches)}):
            together = engine.predict(branches[:num], ranks)
            worst = max(map(relative_difference, together, alone))  # alone may be longer: map stops at the shorter
            allowed = TOLERANCE.get(alone[0].dtype, 1e-4)
            if not worst <= allowed:
                raise WrongAnswerError(ranks, strategy, worst, allowed)
            differences[f"{ranks} {strategy}"] = max(worst, differences.get(f"{ranks} {strategy}", 0.0))
    logger.info("self-check passed", extra={"rank": rank, "differences": differences})
    return differences


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """The 2-norm of the difference over that of what is expected; infinite for another shape."""
    if given.shape != expected.shape:
        return float("inf")
    return float((given.double() - expected.double()).norm() / expected.double().norm())
