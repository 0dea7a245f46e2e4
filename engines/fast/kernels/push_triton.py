"""Rows written into other ranks' memory through NVLink, each straight to its place there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_PROGRAM = 4


@triton.jit
def _push(
    x_ptr, addresses_ptr, rows, columns, target_row_stride, target_column, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    peer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    address = tl.load(addresses_ptr + peer).to(tl.pointer_type(x_ptr.dtype.element_ty))
    # The hint belongs to the pointer: on the integer it would be lost, and each store would be 2 bytes wide.
    address = tl.multiple_of(address, 16)
    x = tl.load(x_ptr + (peer * rows + row[:, None]) * columns + column[None, :], inside)
    tl.store(address + target_column + row[:, None] * target_row_stride + column[None, :], x, inside)


def push_columns(x_WRC: Tensor, addresses_W: Tensor, rank: int) -> None:
    """Writes ``x[j]`` to rank j's inbox (R, W x C), into the columns that belong to ``rank``."""
    world, rows, columns = x_WRC.shape
    assert x_WRC.is_contiguous(), x_WRC.stride()
    _push[(triton.cdiv(rows, ROWS_PER_PROGRAM), world)](
        x_WRC, addresses_W, rows, columns, world * columns, rank * columns,
        ROWS=ROWS_PER_PROGRAM, BLOCK=triton.next_power_of_2(columns), num_warps=4,
    )  # fmt: skip
