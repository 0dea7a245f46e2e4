"""Triton version of ``quantize.py``: one program a row, the row in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.fast.kernels.rows import QuantRows
from engines.quantization.scales import FP8, LARGEST, SMALLEST_AMAX

ROUNDED = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _quantize(
    x_ptr, out_ptr, scale_ptr, columns_each, group_stride, row_stride, channels,
    ROUNDED: tl.constexpr, GELU: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    source = (columns // columns_each) * group_stride + row * row_stride + columns % columns_each
    x = tl.load(x_ptr + source, inside, 0.0).to(ROUNDED).to(tl.float32)
    if GELU:
        # tanh form: x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    step = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST) / LARGEST
    tl.store(scale_ptr + row, step)
    tl.store(out_ptr + row * channels + columns, (x / step).to(out_ptr.dtype.element_ty), inside)


def launch_quantize(x_GRC: Tensor, *, gelu: bool) -> QuantRows:
    groups, rows, columns_each = x_GRC.shape
    into = QuantRows(
        values_RC=torch.empty((rows, groups * columns_each), device=x_GRC.device, dtype=FP8),
        scale_R1=torch.empty((rows, 1), device=x_GRC.device, dtype=torch.float32),
    )
    launch_into(x_GRC, into, gelu=gelu)
    return into


def launch_into(x_GRC: Tensor, into: QuantRows, *, gelu: bool = False, rounded: torch.dtype = torch.float32) -> None:
    groups, rows, columns_each = x_GRC.shape
    channels = groups * columns_each
    assert x_GRC.stride(-1) == 1, x_GRC.stride()
    assert into.values_RC.stride() == (channels, 1), into.values_RC.stride()
    assert into.scale_R1.stride(0) == 1, into.scale_R1.stride()
    block = triton.next_power_of_2(channels)
    _quantize[(rows,)](
        x_GRC, into.values_RC, into.scale_R1, columns_each, x_GRC.stride(0), x_GRC.stride(1), channels,
        ROUNDED=ROUNDED[rounded], GELU=gelu, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
