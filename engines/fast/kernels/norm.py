"""Layer norm with modulation, and the gated residual that comes before it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from engines.fast.kernels.records import EPS, Modulation
from engines.fast.kernels.rows import QuantRows, Rows, quantized


def norm_modulate(x_RC: Tensor, modulation: Modulation, *, quantize: bool = False) -> Rows:
    """Returns ``layer_norm(x) * (1 + scale) + shift``, float32 inside; quantised by rows if asked."""
    if x_RC.is_cuda:
        from engines.fast.kernels.norm_triton import launch_norm

        return launch_norm(x_RC, (), None, modulation, quantize)
    return _plain_norm(x_RC, modulation, quantize)


def residual_norm_modulate(
    x_RC: Tensor, updates: tuple[Tensor, ...], gate_SBC: Tensor, modulation: Modulation, *, quantize: bool = False
) -> Rows:
    """Adds ``gate * sum(updates)`` to ``x_RC`` in place (one or two updates); returns ``norm_modulate`` of the sum.

    ``gate_SBC`` has one or two segments of its own, divided at the same row as the modulation's.
    """
    assert 1 <= len(updates) <= 2, len(updates)
    if x_RC.is_cuda:
        from engines.fast.kernels.norm_triton import launch_norm

        return launch_norm(x_RC, updates, gate_SBC, modulation, quantize)
    gate_RC = modulation.per_row(gate_SBC, x_RC.shape[0])
    x_RC.copy_(x_RC.float() + gate_RC * sum(update.float() for update in updates))
    return _plain_norm(x_RC, modulation, quantize)


def _plain_norm(x_RC: Tensor, modulation: Modulation, quantize: bool) -> Rows:
    rows, channels = x_RC.shape
    shift_RC = modulation.per_row(modulation.shift_SBC, rows)
    scale_RC = modulation.per_row(modulation.scale_SBC, rows)
    normed_RC = functional.layer_norm(x_RC.float(), (channels,), eps=EPS) * (1 + scale_RC) + shift_RC
    result: Tensor | QuantRows = quantized(normed_RC) if quantize else normed_RC.to(x_RC.dtype)
    return result
