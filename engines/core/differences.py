"""How far two answers are apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """Returns the 2-norm of the difference over that of what is expected.

    Infinite for another shape, and where it is no number: the largest of several would pass a NaN over in silence.
    """
    if given.shape != expected.shape:
        return float("inf")
    difference = float((given.double() - expected.double()).norm() / expected.double().norm())
    return float("inf") if math.isnan(difference) else difference
