"""Scales of few-bit numbers: symmetric, from the largest magnitude to the largest number that there is."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.precision import Scheme

FP8 = torch.float8_e4m3fn
LARGEST: dict[Scheme, float] = {"fp8": 448.0, "int8": 127.0}
SMALLEST_AMAX = 1e-12
"""Keeps the scale of zeros finite."""


def row_scales(x_RC: Tensor, scheme: Scheme) -> Tensor:
    """``scale_R1``, float32: one per row."""
    return x_RC.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_AMAX) / LARGEST[scheme]


def weight_scales(weight_NK: Tensor, scheme: Scheme) -> Tensor:
    """``row_scales`` in one pass over ``weight_NK`` and without a copy of it, for weights that change between steps."""
    lowest_N1, highest_N1 = weight_NK.aminmax(dim=-1, keepdim=True)
    return torch.maximum(-lowest_N1, highest_N1).float().clamp(min=SMALLEST_AMAX) / LARGEST[scheme]


def fixed_scale(amax: float, scheme: Scheme) -> float:
    """One for a whole tensor whose largest magnitude was ``amax``."""
    return max(amax, SMALLEST_AMAX) / LARGEST[scheme]


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale`` in ``dtype``; what would become 0 there is the smallest normal number instead."""
    narrow = scale.to(dtype)
    return torch.where(narrow == 0, torch.finfo(dtype).tiny, narrow)
