"""True classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598)."""

from __future__ import annotations

from torch import Tensor


def guided(predictions: tuple[Tensor, ...], scale: float) -> Tensor:
    """One prediction from (prompt,) or (prompt, negative prompt)."""
    if len(predictions) == 1:
        return predictions[0]
    positive, negative = predictions
    return negative + scale * (positive - negative)
