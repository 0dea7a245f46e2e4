"""Triton version of ``norm.py``: one program a row, the row in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.fast.kernels.records import EPS, Modulation
from engines.fast.kernels.rows import QuantRows, Rows
from engines.quantization.scales import FP8, LARGEST, SMALLEST_AMAX


@triton.jit
def _residual_norm(
    x_ptr, y_ptr, z_ptr, gate_ptr, shift_ptr, scale_ptr, out_ptr, out_scale_ptr,
    first_rows, batch, channels, gate_seg, gate_batch, mod_seg, mod_batch, eps,
    NUM_UPDATES: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    entry = row % batch
    segment = (row >= first_rows).to(tl.int64)
    x = tl.load(x_ptr + row * channels + columns, inside, 0.0).to(tl.float32)
    if NUM_UPDATES > 0:
        y = tl.load(y_ptr + row * channels + columns, inside, 0.0).to(tl.float32)
        if NUM_UPDATES > 1:
            y += tl.load(z_ptr + row * channels + columns, inside, 0.0).to(tl.float32)
        gate = tl.load(gate_ptr + segment * gate_seg + entry * gate_batch + columns, inside, 0.0).to(tl.float32)
        x += gate * y
        tl.store(x_ptr + row * channels + columns, x.to(x_ptr.dtype.element_ty), inside)
    mean = tl.sum(x, 0) / channels
    centred = tl.where(inside, x - mean, 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 0) / channels + eps)
    modulation = segment * mod_seg + entry * mod_batch + columns
    scale = tl.load(scale_ptr + modulation, inside, 0.0).to(tl.float32)
    shift = tl.load(shift_ptr + modulation, inside, 0.0).to(tl.float32)
    normed = centred * spread * (1.0 + scale) + shift
    if QUANTIZE:
        step = tl.maximum(tl.max(tl.abs(normed), 0), SMALLEST) / LARGEST
        tl.store(out_scale_ptr + row, step)
        normed = normed / step
    tl.store(out_ptr + row * channels + columns, normed.to(out_ptr.dtype.element_ty), inside)


def launch_norm(
    x_RC: Tensor, updates: tuple[Tensor, ...], gate_SBC: Tensor | None, modulation: Modulation, quantize: bool
) -> Rows:
    """Returns ``norm.residual_norm_modulate``, or ``norm.norm_modulate`` without updates."""
    rows, channels = x_RC.shape
    shift_SBC, scale_SBC = modulation.shift_SBC, modulation.scale_SBC
    gate_SBC = shift_SBC if gate_SBC is None else gate_SBC
    for vectors_SBC in (gate_SBC, shift_SBC, scale_SBC):
        assert vectors_SBC.stride(-1) == 1, vectors_SBC.stride()
    assert shift_SBC.stride() == scale_SBC.stride()
    assert all(tensor.is_contiguous() for tensor in (x_RC, *updates))
    out_RC = torch.empty_like(x_RC, dtype=FP8 if quantize else x_RC.dtype)
    out_scale_R1 = x_RC.new_empty((rows, 1) if quantize else (1, 1), dtype=torch.float32)
    y, z = (*updates, x_RC, x_RC)[:2]
    block = triton.next_power_of_2(channels)
    _residual_norm[(rows,)](
        x_RC, y, z, gate_SBC, shift_SBC, scale_SBC, out_RC, out_scale_R1,
        modulation.first_rows, shift_SBC.shape[1], channels, _segment_stride(gate_SBC), gate_SBC.stride(1),
        _segment_stride(shift_SBC), shift_SBC.stride(1), EPS,
        NUM_UPDATES=len(updates), QUANTIZE=quantize, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return QuantRows(values_RC=out_RC, scale_R1=out_scale_R1) if quantize else out_RC


def _segment_stride(x_SBC: Tensor) -> int:
    return x_SBC.stride(0) if x_SBC.shape[0] > 1 else 0
