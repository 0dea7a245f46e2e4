"""Weights plus low-rank products in one pass: each tile of a weight is read once, and written once.

Dims: N outputs, K inputs, R rank. One launch computes the sums of several weights. An element's sum runs over the rank
alone, in one order, so that it has the same bits in a whole weight and in any share of it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engines.fast.records import MAX_SUMS, Kind, WeightSum


class Tile(NamedTuple):
    """Size of the part of a weight that one program computes, and its settings."""

    rows: int
    columns: int
    ranks: int
    """Part of the rank that one step of the sum covers."""
    num_warps: int


TILES = {
    (2, True): Tile(64, 128, 64, 4),
    (2, False): Tile(64, 64, 64, 4),
    (4, True): Tile(64, 64, 32, 4),
    (4, False): Tile(64, 64, 32, 4),
}
"""Tiles by the bytes of a factor's element, and whether weights have one product."""
FLOAT32_PRECISION = "bf16x6"
"""Products of float32 are the six largest products of three bfloat16 parts each."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WEIGHT_FIELDS, PRODUCT_FIELDS = tl.constexpr(8), tl.constexpr(4)
"""Numbers of a weight and of a product in the table."""
NEVER = 2**31 - 1
"""First tile of a weight that is not there."""


@triton.jit
def _product(
    fields, row, column, rows, columns,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Return a tile of ``up @ down``. ``EACH`` divides the numbers of columns and of ranks."""
    up_ptr = tl.multiple_of(tl.load(fields).to(tl.pointer_type(FACTOR)), 2 * EACH)
    down_ptr = tl.multiple_of(tl.load(fields + 1).to(tl.pointer_type(FACTOR)), 2 * EACH)
    rank = tl.multiple_of(tl.load(fields + 2).to(tl.int32), EACH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        inside = (row < rows)[:, None] & (ranks < rank)[None, :]
        up = tl.load(up_ptr + row[:, None] * rank + ranks[None, :], inside, 0.0)
        inside = (ranks < rank)[:, None] & (column < columns)[None, :]
        down = tl.load(down_ptr + ranks[:, None] * columns + column[None, :], inside, 0.0)
        total = tl.dot(up, down, total, input_precision=PRECISION)
    return total


@triton.jit
def _amount(fields):
    return tl.load(fields + 3).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _sum(
    table_ptr,
    WEIGHT: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, SINGLE: tl.constexpr, EACH: tl.constexpr,
    MAX_SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write one tile of one weight. ``SINGLE``: every weight has one product."""
    tile = tl.program_id(0)
    first_tiles = tl.load(table_ptr + tl.arange(0, MAX_SUMS))
    is_before = first_tiles <= tile
    which = tl.sum(is_before.to(tl.int32), 0) - 1
    tile -= tl.max(tl.where(is_before, first_tiles, 0), 0).to(tl.int32)
    fields = table_ptr + MAX_SUMS + which * WEIGHT_FIELDS
    base_ptr = tl.multiple_of(tl.load(fields).to(tl.pointer_type(WEIGHT)), 2 * EACH)
    out_ptr = tl.multiple_of(tl.load(fields + 1).to(tl.pointer_type(WEIGHT)), 2 * EACH)
    rows = tl.load(fields + 2).to(tl.int32)
    columns = tl.multiple_of(tl.load(fields + 3).to(tl.int32), EACH)
    base_stride = tl.multiple_of(tl.load(fields + 4), EACH)
    out_stride = tl.multiple_of(tl.load(fields + 5), EACH)
    tiles_across = tl.cdiv(columns, COLUMNS)
    row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    base = tl.load(base_ptr + row[:, None] * base_stride + column[None, :], inside, 0.0)  # early: it takes longest
    product = table_ptr + MAX_SUMS * (1 + WEIGHT_FIELDS)
    if SINGLE:
        product += which * PRODUCT_FIELDS
        total = _product(product, row, column, rows, columns, FACTOR, PRECISION, EACH, ROWS, COLUMNS, RANKS)
        total *= _amount(product)
    else:
        product += tl.load(fields + 6) * PRODUCT_FIELDS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(tl.load(fields + 7)):
            one = _product(product, row, column, rows, columns, FACTOR, PRECISION, EACH, ROWS, COLUMNS, RANKS)
            total += one * _amount(product)
            product += PRODUCT_FIELDS
    total += base.to(tl.float32)
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], total.to(WEIGHT), inside)


def launch_sums(sums: Sequence[WeightSum], kind: Kind) -> None:
    """Compute at most ``MAX_SUMS`` sums, all of one kind."""
    device = sums[0].out_NK.device
    tile = TILES[kind.factor.itemsize, kind.is_single]
    values, num_tiles = _table(sums, tile)
    table_host = torch.frombuffer(values, dtype=torch.int64)
    with torch.cuda.device(device):  # Triton launches on the current device, the thread's own
        table = table_host.to(device, non_blocking=True)
        _sum[(num_tiles,)](
            table, WEIGHT=TYPES[kind.weight], FACTOR=TYPES[kind.factor],
            PRECISION=FLOAT32_PRECISION if kind.factor == torch.float32 else "ieee", SINGLE=kind.is_single,
            EACH=kind.each, MAX_SUMS=MAX_SUMS, ROWS=tile.rows, COLUMNS=tile.columns, RANKS=tile.ranks,
            num_warps=tile.num_warps,
        )  # fmt: skip


def _table(sums: Sequence[WeightSum], tile: Tile) -> tuple[array[int], int]:
    """Return each weight's first tile, the weights' and the products' fields, and the number of tiles."""
    firsts, weights, products = list[int](), list[int](), list[int]()
    num_tiles = num_products = 0
    for one in sums:
        base_NK, out_NK = one.base_NK, one.out_NK
        rows, columns = out_NK.shape
        firsts.append(num_tiles)
        strides = base_NK.stride(0), out_NK.stride(0)
        num_own = len(one.products)
        weights += (base_NK.data_ptr(), out_NK.data_ptr(), rows, columns, *strides, num_products, num_own)
        for amount, low_rank in one.products:
            down_RK = low_rank.down_RK
            products += (
                low_rank.up_NR.data_ptr(),
                down_RK.data_ptr(),
                down_RK.shape[0],
                _bits(amount * low_rank.scale),
            )
        num_products += num_own
        num_tiles += -(-rows // tile.rows) * -(-columns // tile.columns)
    missing = MAX_SUMS - len(sums)
    table = array("q", firsts + [NEVER] * missing + weights)
    table.frombytes(bytes(table.itemsize * missing * WEIGHT_FIELDS.value))
    table.extend(products)
    return table, num_tiles


@lru_cache
def _bits(amount: float) -> int:
    """Return the bits of ``amount`` in float32."""
    (bits,) = struct.unpack("i", struct.pack("f", amount))
    return int(bits)
