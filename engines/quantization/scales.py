"""Symmetric scales of few-bit numbers: the largest magnitude maps to the largest representable number."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.precision import Scheme

FP8 = torch.float8_e4m3fn
LARGEST: dict[Scheme, float] = {"fp8": 448.0, "int8": 127.0}
SMALLEST_AMAX = 1e-12
"""Keeps the scale of zeros finite."""


def row_scales(x_RC: Tensor, scheme: Scheme) -> Tensor:
    """Return ``scale_R1``, float32: one per row."""
    return x_RC.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_AMAX) / LARGEST[scheme]


def weight_scales(weight_NK: Tensor, scheme: Scheme) -> Tensor:
    """Return ``row_scales`` in one pass over ``weight_NK``, without a copy, for weights that change between steps."""
    lowest_N1, highest_N1 = weight_NK.aminmax(dim=-1, keepdim=True)
    return torch.maximum(-lowest_N1, highest_N1).float().clamp(min=SMALLEST_AMAX) / LARGEST[scheme]


def fixed_scale(amax: float, scheme: Scheme) -> float:
    """Return the scale of a whole tensor whose largest magnitude is ``amax``."""
    return max(amax, SMALLEST_AMAX) / LARGEST[scheme]


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` in ``dtype``; an underflow to 0 becomes the smallest normal number."""
    narrow = scale.to(dtype)
    return torch.where(narrow == 0, torch.finfo(dtype).tiny, narrow)
