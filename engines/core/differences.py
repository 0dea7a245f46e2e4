"""Relative difference of two tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def relative_difference(given: Tensor, expected: Tensor) -> float:
    """Return the 2-norm of the difference, divided by that of ``expected``.

    The result is infinite if shapes differ or the quotient is NaN, which ``max`` would ignore. Two all-zero tensors
    have difference 0.
    """
    if given.shape != expected.shape:
        return float("inf")
    apart = (given.double() - expected.double()).norm()
    relative = float(apart / expected.double().norm()) if apart else 0.0
    return float("inf") if math.isnan(relative) else relative
