"""Fused elementwise operations between GEMMs: one pass over memory each, in Triton on CUDA, else in plain PyTorch.

Dims: R rows (tokens × batch, batch innermost), C channels, S segments of rows with their own modulation, B batch. The
plain version of each is its specification and the path on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import Precision, WriteWeight
from engines.fast.records import EPS, HeadNorms, Modulation, QuantRows, Rows, quantized


def gated(x_RE: Tensor) -> Tensor:
    """Return ``silu(first half) * second half`` of each row, float32 inside."""
    if x_RE.is_cuda:
        from engines.fast.triton_kernels import launch_gated

        return launch_gated(x_RE)
    gate_RF, up_RF = x_RE.float().chunk(2, dim=1)
    return (functional.silu(gate_RF) * up_RF).to(x_RE.dtype)


def norm_and_rotate(qkv_R3HD: Tensor, norms: HeadNorms, out_LB3HD: Tensor) -> None:
    """Write q and k (normalised, rotated) and v (unchanged) of all rows into ``out``, a view with any strides.

    Rows are tokens × batch, batch innermost. ``out`` has dims (L, B, 3, ..., D), whose middle dims number the heads;
    the contents of surplus heads are undefined. If ``out`` is a view of ``qkv`` itself, v stays in place, and there
    must be no bias.
    """
    assert norms.bias_3HD is None or out_LB3HD.data_ptr() != qkv_R3HD.data_ptr(), "v would not get its bias"
    if qkv_R3HD.is_cuda:
        from engines.fast.triton_kernels import launch_norm_and_rotate

        launch_norm_and_rotate(qkv_R3HD, norms, out_LB3HD)
        return
    rows, _, _, dim = qkv_R3HD.shape
    if norms.bias_3HD is not None:
        qkv_R3HD = qkv_R3HD + norms.bias_3HD
    weight_R12D = torch.cat(
        (
            norms.weight_S2D[:1].expand(norms.first_rows, 2, dim),
            norms.weight_S2D[-1:].expand(rows - norms.first_rows, 2, dim),
        )
    ).unsqueeze(2)
    x_R2HD = qkv_R3HD[:, :2].float()
    x_R2HD = x_R2HD * torch.rsqrt(x_R2HD.square().mean(-1, keepdim=True) + norms.eps) * weight_R12D.float()
    even, odd = x_R2HD[..., 0::2], x_R2HD[..., 1::2]
    batch = out_LB3HD.shape[1]
    cos, sin = (table_LP.repeat_interleave(batch, 0)[:, None, None] for table_LP in (norms.cos_LP, norms.sin_LP))
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    both_R3HD = torch.cat((rotated.to(qkv_R3HD.dtype), qkv_R3HD[:, 2:]), dim=1)
    missing = math.prod(out_LB3HD.shape[3:-1]) - both_R3HD.shape[2]
    both_R3HD = functional.pad(both_R3HD, (0, 0, 0, missing))
    out_LB3HD.copy_(both_R3HD.view(out_LB3HD.shape[0], batch, 3, *out_LB3HD.shape[3:-1], dim))


def norm_modulate(x_RC: Tensor, modulation: Modulation, *, quantize: bool = False) -> Rows:
    """Return ``layer_norm(x) * (1 + scale) + shift``, float32 inside; quantised by rows if ``quantize``."""
    if x_RC.is_cuda:
        from engines.fast.triton_kernels import launch_norm

        return launch_norm(x_RC, (), None, modulation, quantize)
    return _plain_norm(x_RC, modulation, quantize)


def residual_norm_modulate(
    x_RC: Tensor, updates: tuple[Tensor, ...], gate_SBC: Tensor, modulation: Modulation, *, quantize: bool = False
) -> Rows:
    """Add ``gate * sum(updates)`` to ``x_RC`` in place (one or two updates); return ``norm_modulate`` of the sum.

    ``gate_SBC`` has one or two segments, divided at the same row as the modulation's.
    """
    assert 1 <= len(updates) <= 2, len(updates)
    if x_RC.is_cuda:
        from engines.fast.triton_kernels import launch_norm

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


def quantize_rows(x_GRC: Tensor, *, gelu: bool = False) -> QuantRows:
    """Return rows ``x[0, r] | x[1, r] | ...`` (G groups of columns), after tanh-form GELU if ``gelu``, quantised.

    A two-dimensional ``x_RC`` is one group.
    """
    x_GRC = x_GRC if x_GRC.ndim == 3 else x_GRC[None]
    if x_GRC.is_cuda:
        from engines.fast.triton_kernels import launch_quantize

        return launch_quantize(x_GRC, gelu=gelu)
    x_RC = x_GRC.movedim(0, 1).flatten(1).float()
    return quantized(functional.gelu(x_RC, approximate="tanh") if gelu else x_RC)


def quantize_weight(weight_NK: Tensor, dtype: torch.dtype, into: QuantRows) -> None:
    """Write a weight, rounded to ``dtype``, to ``into``, which has a contiguous row per output feature."""
    if weight_NK.is_cuda:
        from engines.fast.triton_kernels import launch_weights

        launch_weights([(weight_NK, dtype, into)])
    else:
        rows = quantized(weight_NK.to(dtype))
        into.values_RC.copy_(rows.values_RC)
        into.scale_R1.copy_(rows.scale_R1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowsWriter:
    """Writes a weight's new values to its rows in float8, in place: captured steps see them."""

    part_of: Callable[[Tensor], Tensor]
    """Returns what the rows stand for of the weight."""
    dtype: torch.dtype
    """Values are rounded to it first."""
    into: QuantRows
    """Contiguous rows, one per output feature."""

    def __call__(self, weight_NK: Tensor) -> None:
        quantize_weight(self.part_of(weight_NK), self.dtype, self.into)


def write_weights(writes: Sequence[tuple[WriteWeight, Tensor]]) -> None:
    """Pass each weight to its function; those of ``RowsWriter`` on CUDA together, by few launches."""
    rows: list[tuple[Tensor, torch.dtype, QuantRows]] = []
    for write, weight_NK in writes:
        if isinstance(write, RowsWriter) and weight_NK.is_cuda:
            rows.append((write.part_of(weight_NK), write.dtype, write.into))
        else:
            write(weight_NK)
    if rows:
        from engines.fast.triton_kernels import launch_weights

        launch_weights(rows)


def join_columns(x_GRC: Tensor) -> Tensor:
    """Return ``x_RC``, groups of columns side by side; no copy if there is one group."""
    columns = x_GRC.unbind(0)
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def collected_rows(x_GRC: Tensor, precision: Precision) -> Rows:
    """Return the result of an exchange as rows for the next GEMM, quantised unless it is native."""
    return join_columns(x_GRC) if precision == "native" else quantize_rows(x_GRC)


def join_rows(first: Rows, second: Rows) -> Rows:
    """Return both, concatenated along the rows."""
    if isinstance(first, QuantRows):
        assert isinstance(second, QuantRows)
        pairs = ((first.values_RC, second.values_RC), (first.scale_R1, second.scale_R1))
        values_RC, scale_R1 = (torch.cat(pair) for pair in pairs)
        return QuantRows(values_RC=values_RC, scale_R1=scale_R1)
    assert isinstance(second, Tensor)
    return torch.cat((first, second))


def scaled_norm(x_RC: Tensor, scale_BC: Tensor, *, eps: float, quantize: bool = False) -> Rows:
    """Return ``rms_norm(x) * scale``, float32 inside; quantised by rows if ``quantize``."""
    if x_RC.is_cuda:
        from engines.fast.triton_kernels import launch_scaled_norm

        return launch_scaled_norm(x_RC, None, None, scale_BC, eps, quantize)
    normed_RC = _rms_norm(x_RC, eps) * _per_row(scale_BC, x_RC)
    return quantized(normed_RC) if quantize else normed_RC.to(x_RC.dtype)


def add_normed(
    x_RC: Tensor, update_RC: Tensor, gate_BC: Tensor, scale_BC: Tensor, *, eps: float, quantize: bool = False
) -> Rows:
    """Add ``gate * rms_norm(update)`` to ``x_RC`` in place; return ``scaled_norm`` of the sum."""
    if x_RC.is_cuda:
        from engines.fast.triton_kernels import launch_scaled_norm

        return launch_scaled_norm(x_RC, update_RC, gate_BC, scale_BC, eps, quantize)
    x_RC.copy_(x_RC.float() + _per_row(gate_BC, x_RC) * _rms_norm(update_RC, eps))
    return scaled_norm(x_RC, scale_BC, eps=eps, quantize=quantize)


def group_norm(x_BCHW: Tensor, norm: nn.GroupNorm, *, silu: bool) -> Tensor:
    """Return ``norm`` of feature maps, followed by SiLU if ``silu``; float32 inside.

    On CUDA the result lies in channels-last memory, and an input in another layout is copied to that first. PyTorch's
    own kernel copies the other way, and SiLU takes one more pass.
    """
    if x_BCHW.is_cuda:
        from engines.fast.triton_group_norm import launch_group_norm

        with torch.cuda.device(x_BCHW.device):  # Triton launches on the current device, the thread's own
            return launch_group_norm(x_BCHW, norm, silu=silu)
    weight_C, bias_C = (None if one is None else one.float() for one in (norm.weight, norm.bias))
    normed_BCHW = functional.group_norm(x_BCHW.float(), norm.num_groups, weight_C, bias_C, norm.eps)
    return (functional.silu(normed_BCHW) if silu else normed_BCHW).to(x_BCHW.dtype)


def _rms_norm(x_RC: Tensor, eps: float) -> Tensor:
    x_RC = x_RC.float()
    return x_RC * torch.rsqrt(x_RC.square().mean(1, keepdim=True) + eps)


def _per_row(vectors_BC: Tensor, x_RC: Tensor) -> Tensor:
    return vectors_BC.float().repeat(x_RC.shape[0] // vectors_BC.shape[0], 1)


__all__ = [
    "HeadNorms",
    "Modulation",
    "QuantRows",
    "Rows",
    "RowsWriter",
    "add_normed",
    "collected_rows",
    "gated",
    "group_norm",
    "join_columns",
    "join_rows",
    "norm_and_rotate",
    "norm_modulate",
    "quantize_rows",
    "quantize_weight",
    "residual_norm_modulate",
    "scaled_norm",
    "write_weights",
]
