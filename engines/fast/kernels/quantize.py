"""Rows to float8, with what comes before it in the same pass: joining column groups, GELU, rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engines.fast.kernels.rows import QuantRows, quantized


def quantize_rows(x_GRC: Tensor, *, gelu: bool = False) -> QuantRows:
    """Returns rows ``x[0, r] | x[1, r] | ...`` (G groups of columns), through GELU (tanh form) if asked, quantised.

    A two-dimensional ``x_RC`` is one group.
    """
    x_GRC = x_GRC if x_GRC.ndim == 3 else x_GRC[None]
    if x_GRC.is_cuda:
        from engines.fast.kernels.quantize_triton import launch_quantize

        return launch_quantize(x_GRC, gelu=gelu)
    x_RC = x_GRC.movedim(0, 1).flatten(1).float()
    return quantized(functional.gelu(x_RC, approximate="tanh") if gelu else x_RC)


def quantize_weight(weight_NK: Tensor, dtype: torch.dtype, into: QuantRows) -> None:
    """Writes a weight, rounded to ``dtype``, to ``into``, which has a row for each output feature (contiguous)."""
    if weight_NK.is_cuda:
        from engines.fast.kernels.quantize_triton import launch_into

        launch_into(weight_NK[None], into, rounded=dtype)
    else:
        rows = quantized(weight_NK.to(dtype))
        into.values_RC.copy_(rows.values_RC)
        into.scale_R1.copy_(rows.scale_R1)
