"""RMS norms before and after what a residual gets ("sandwich"), each with a scale and no shift."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.fast.kernels.rows import Rows, quantized


def scaled_norm(x_RC: Tensor, scale_BC: Tensor, *, eps: float, quantize: bool = False) -> Rows:
    """Returns ``rms_norm(x) * scale``, float32 inside; quantised by rows if asked."""
    if x_RC.is_cuda:
        from engines.fast.kernels.sandwich_triton import launch_scaled_norm

        return launch_scaled_norm(x_RC, None, None, scale_BC, eps, quantize)
    normed_RC = _rms_norm(x_RC, eps) * _per_row(scale_BC, x_RC)
    return quantized(normed_RC) if quantize else normed_RC.to(x_RC.dtype)


def add_normed(
    x_RC: Tensor, update_RC: Tensor, gate_BC: Tensor, scale_BC: Tensor, *, eps: float, quantize: bool = False
) -> Rows:
    """Adds ``gate * rms_norm(update)`` to ``x_RC`` in place; returns ``scaled_norm`` of the sum."""
    if x_RC.is_cuda:
        from engines.fast.kernels.sandwich_triton import launch_scaled_norm

        return launch_scaled_norm(x_RC, update_RC, gate_BC, scale_BC, eps, quantize)
    x_RC.copy_(x_RC.float() + _per_row(gate_BC, x_RC) * _rms_norm(update_RC, eps))
    return scaled_norm(x_RC, scale_BC, eps=eps, quantize=quantize)


def _rms_norm(x_RC: Tensor, eps: float) -> Tensor:
    x_RC = x_RC.float()
    return x_RC * torch.rsqrt(x_RC.square().mean(1, keepdim=True) + eps)


def _per_row(vectors_BC: Tensor, x_RC: Tensor) -> Tensor:
    return vectors_BC.float().repeat(x_RC.shape[0] // vectors_BC.shape[0], 1)
