"""How far an answer is from the one that is expected."""

from __future__ import annotations

from torch import Tensor

from engines.core.tensors import relative_difference


def relative_error(given: Tensor, expected: Tensor, allowed: float | None = None) -> float:
    """Returns it in three digits. AssertionError for one that is not below ``allowed``."""
    error = relative_difference(given, expected)
    assert allowed is None or error < allowed, f"wrong answer: relative error {error:.3f}"
    return float(f"{error:.2e}")
