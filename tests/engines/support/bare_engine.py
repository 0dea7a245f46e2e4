"""What an engine of tests has besides its predictions: one rank, nothing to compile, to know or to release."""

from __future__ import annotations

from typing import ClassVar

from engines.core.estimates import StepEstimates
from engines.core.model import Branch


class BareEngine:
    """An ``Engine`` but for ``predict``."""

    was_warm: ClassVar[bool] = True
    team_sizes: ClassVar[tuple[int, ...]] = (1,)
    estimates: ClassVar[StepEstimates | None] = None

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """Nothing to compile."""

    def close(self) -> None:
        """Nothing to release."""
