"""How far two answers are apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """Returns the 2-norm of the difference over that of what is expected.

    Infinite for another shape, and where it is no number: the largest of several would pass a NaN over in silence. Two
    answers that are zero everywhere are alike.
    """
    if given.shape != expected.shape:
        return float("inf")
    apart = (given.double() - expected.double()).norm()
    relative = float(apart / expected.double().norm()) if apart else 0.0
    return float("inf") if math.isnan(relative) else relative
