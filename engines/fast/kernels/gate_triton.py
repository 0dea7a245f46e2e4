"""Triton version of ``gate.py``: one program a row and run of columns."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _gated(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < columns
    gate = tl.load(x_ptr + row * 2 * columns + places, inside, 0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * columns + places, inside, 0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * columns + places, result.to(out_ptr.dtype.element_ty), inside)


def launch_gated(x_RE: Tensor) -> Tensor:
    assert x_RE.is_contiguous()
    rows, columns = x_RE.shape[0], x_RE.shape[1] // 2
    out_RF = x_RE.new_empty(rows, columns)
    _gated[(rows, triton.cdiv(columns, BLOCK))](x_RE, out_RF, columns, BLOCK=BLOCK, num_warps=4)
    return out_RF
