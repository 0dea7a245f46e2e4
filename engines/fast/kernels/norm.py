"""Layer norm with modulation, and the gated residual that comes before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engines.fast.kernels.rows import QuantRows, Rows, quantized

EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Modulation:
    """Shift and scale after a layer norm, ``shift_SBC`` and ``scale_SBC``: one per segment and batch entry.

    The first ``first_rows`` rows take segment 0, the others the last segment (the same one when there is only one).
    """

    shift_SBC: Tensor
    scale_SBC: Tensor
    first_rows: int

    def of_stream(self, number: int, num_rows: int) -> Modulation:
        """For the ``num_rows`` rows of the first (0) or the last (1) segment alone."""
        vectors = (x_SBC[:1] if number == 0 else x_SBC[-1:] for x_SBC in (self.shift_SBC, self.scale_SBC))
        shift_1BC, scale_1BC = vectors
        return Modulation(shift_SBC=shift_1BC, scale_SBC=scale_1BC, first_rows=num_rows)

    def per_row(self, x_SBC: Tensor, num_rows: int) -> Tensor:
        """``x_SBC`` spread over the rows it is for, float32."""
        batch = x_SBC.shape[1]
        first = x_SBC[0].float().repeat(self.first_rows // batch, 1)
        return torch.cat((first, x_SBC[-1].float().repeat((num_rows - self.first_rows) // batch, 1)))


def norm_modulate(x_RC: Tensor, modulation: Modulation, *, quantize: bool = False) -> Rows:
    """``layer_norm(x) * (1 + scale) + shift``, float32 inside; quantised by rows if asked."""
    if x_RC.is_cuda:
        from engines.fast.kernels import norm_triton

        return norm_triton.launch(x_RC, (), None, modulation, quantize)
    return _plain_norm(x_RC, modulation, quantize)


def residual_norm_modulate(
    x_RC: Tensor, updates: tuple[Tensor, ...], gate_SBC: Tensor, modulation: Modulation, *, quantize: bool = False
) -> Rows:
    """Add ``gate * sum(updates)`` to ``x_RC`` in place (one or two updates), then ``norm_modulate``.

    ``gate_SBC`` has one or two segments of its own, divided at the same row as the modulation's.
    """
    assert 1 <= len(updates) <= 2, len(updates)
    if x_RC.is_cuda:
        from engines.fast.kernels import norm_triton

        return norm_triton.launch(x_RC, updates, gate_SBC, modulation, quantize)
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
