"""Triton version of ``sandwich.py``: one program a row, the row in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.fast.kernels.rows import QuantRows, Rows
from engines.quantization.scales import FP8, LARGEST, SMALLEST_AMAX


@triton.jit
def _sandwich(
    x_ptr, y_ptr, gate_ptr, scale_ptr, out_ptr, out_scale_ptr, batch, channels, gate_batch, scale_batch, eps,
    ADDS: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    entry = row % batch
    x = tl.load(x_ptr + row * channels + columns, inside, 0.0).to(tl.float32)
    if ADDS:
        y = tl.load(y_ptr + row * channels + columns, inside, 0.0).to(tl.float32)
        gate = tl.load(gate_ptr + entry * gate_batch + columns, inside, 0.0).to(tl.float32)
        x += gate * (y * tl.rsqrt(tl.sum(y * y, 0) / channels + eps))
        tl.store(x_ptr + row * channels + columns, x.to(x_ptr.dtype.element_ty), inside)
    scale = tl.load(scale_ptr + entry * scale_batch + columns, inside, 0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / channels + eps) * scale
    if QUANTIZE:
        step = tl.maximum(tl.max(tl.abs(normed), 0), SMALLEST) / LARGEST
        tl.store(out_scale_ptr + row, step)
        normed = normed / step
    tl.store(out_ptr + row * channels + columns, normed.to(out_ptr.dtype.element_ty), inside)


def launch_scaled_norm(
    x_RC: Tensor, update_RC: Tensor | None, gate_BC: Tensor | None, scale_BC: Tensor, eps: float, quantize: bool
) -> Rows:
    """Returns ``sandwich.add_normed``, or ``sandwich.scaled_norm`` without an update."""
    rows, channels = x_RC.shape
    gate_BC = scale_BC if gate_BC is None else gate_BC
    assert gate_BC.stride(-1) == scale_BC.stride(-1) == 1, (gate_BC.stride(), scale_BC.stride())
    assert x_RC.is_contiguous()
    assert update_RC is None or update_RC.is_contiguous()
    out_RC = torch.empty_like(x_RC, dtype=FP8 if quantize else x_RC.dtype)
    out_scale_R1 = x_RC.new_empty((rows, 1) if quantize else (1, 1), dtype=torch.float32)
    block = triton.next_power_of_2(channels)
    _sandwich[(rows,)](
        x_RC, x_RC if update_RC is None else update_RC, gate_BC, scale_BC, out_RC, out_scale_R1,
        scale_BC.shape[0], channels, gate_BC.stride(0), scale_BC.stride(0), eps,
        ADDS=update_RC is not None, QUANTIZE=quantize, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return QuantRows(values_RC=out_RC, scale_R1=out_scale_R1) if quantize else out_RC
