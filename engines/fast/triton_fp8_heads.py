"""Triton version of ``fp8_heads``: sums and extremes of parts of the tokens, then the scaled values in float8.

A program takes one head of one tensor (q, then k, then v) and every P-th tile of its tokens, P parts in all. Extremes
of each channel give the largest magnitude after the mean is subtracted: keys are read twice, not three times. The
second kernel walks back from the last tile, which the first one has just read into the cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_PARTS = 16
"""Parts of a head's tokens, each a program: with 6 heads or more they fill a GPU. Each of the second kernel reads its
head's sums of all parts, so more are not better. The number depends on nothing but the tokens: a head has the same mean
alone, in a batch, and on ranks that hold fewer heads."""
TILE = 8192
"""Elements of a tile."""
NUM_WARPS = 4
NUM_SUMS = 3
"""Rows of each part of the keys: sum, lowest and highest value by channel."""
LENGTHS = ["length", "num_rows", "num_tiles", "num_row_tiles"]
"""Arguments that change with the request: a kernel serves all of them."""


@triton.jit
def _load(source, row, inside, token_stride, head_dim, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    seen = inside[:, None] & (columns < head_dim)[None, :]
    return tl.load(source + row.to(tl.int64)[:, None] * token_stride + columns[None, :], seen, 0.0).to(tl.float32)


@triton.jit
def _attended(order_ptr, num_keys_ptr, picture, num_rows, HAS_MASK: tl.constexpr):
    """Return the order of a picture's keys, and how many are attended."""
    if HAS_MASK:
        order_ptr += picture * num_rows
        num_rows = tl.load(num_keys_ptr + picture)
    return order_ptr, num_rows


@triton.jit
def _origins(order_ptr, tile, count, HAS_MASK: tl.constexpr, ROWS: tl.constexpr):
    """Return where a tile's rows are read, and which of them are among the first ``count``."""
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < count
    origin = row.to(tl.int64)
    if HAS_MASK:
        origin = tl.load(order_ptr + row, inside, 0)
    return origin, inside


@triton.jit
def _amax(
    source, token_stride, order_ptr, count, tiles, head_dim, part, parts,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    largest = tl.zeros((ROWS,), tl.float32)
    for tile in range(part, tiles, parts):
        origin, inside = _origins(order_ptr, tile, count, HAS_MASK, ROWS)
        x = _load(source, origin, inside, token_stride, head_dim, BLOCK)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    return tl.max(largest, 0)


@triton.jit
def _write_sums(
    source, target, token_stride, order_ptr, count, tiles, head_dim, part, parts,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for tile in range(part, tiles, parts):
        origin, inside = _origins(order_ptr, tile, count, HAS_MASK, ROWS)
        x = _load(source, origin, inside, token_stride, head_dim, BLOCK)
        total += tl.sum(x, 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside[:, None], x, float("inf")), 0))
        highest = tl.maximum(highest, tl.max(tl.where(inside[:, None], x, float("-inf")), 0))
    columns = tl.arange(0, BLOCK)
    tl.store(target + columns, total)
    tl.store(target + BLOCK + columns, lowest)
    tl.store(target + 2 * BLOCK + columns, highest)


@triton.jit(do_not_specialize=LENGTHS)
def _measure(
    q_ptr, k_ptr, v_ptr, order_ptr, num_keys_ptr, amax_ptr, sums_ptr, q_batch, q_token, q_head, k_batch, k_token,
    k_head, v_batch, v_token, v_head, length, num_rows, num_tiles, num_row_tiles, heads, groups, head_dim,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitude of this part of a head of q or v; of k each channel's sum, lowest and highest."""
    head, part, picture = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts = tl.num_programs(1)
    place = (picture * (heads + 2 * groups) + head) * parts + part
    order_ptr, count = _attended(order_ptr, num_keys_ptr, picture, num_rows, HAS_MASK)
    if head < heads:
        source = q_ptr + picture * q_batch + head * q_head
        largest = _amax(source, q_token, order_ptr, length, num_tiles, head_dim, part, parts, False, ROWS, BLOCK)
        tl.store(amax_ptr + place, largest)
    elif head < heads + groups:
        group = head - heads
        target = sums_ptr + ((picture * groups + group) * parts + part) * 3 * BLOCK
        _write_sums(
            k_ptr + picture * k_batch + group * k_head, target, k_token, order_ptr, count, num_row_tiles, head_dim,
            part, parts, HAS_MASK, ROWS, BLOCK,
        )  # fmt: skip
    else:
        source = v_ptr + picture * v_batch + (head - heads - groups) * v_head
        largest = _amax(source, v_token, order_ptr, count, num_row_tiles, head_dim, part, parts, HAS_MASK, ROWS, BLOCK)
        tl.store(amax_ptr + place, largest)


@triton.jit
def _scale(amax, descale_ptr, part, MIN_AMAX: tl.constexpr):
    """Return the scale, as ``fp8_heads._scales`` does. Part 0 (of the first head that shares it) writes its inverse."""
    exponent = (tl.maximum(amax, MIN_AMAX).to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    if part == 0:
        tl.store(descale_ptr, ((exponent - 8) << 23).to(tl.float32, bitcast=True))
    scale = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _largest(amax_ptr, count, BLOCK: tl.constexpr):
    numbers = tl.arange(0, BLOCK)
    return tl.max(tl.load(amax_ptr + numbers, numbers < count, 0.0), 0)


@triton.jit
def _mean(sums_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    parts, columns = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    totals = tl.load(sums_ptr + parts[:, None] * 3 * BLOCK + columns[None, :])
    return tl.sum(totals, 0) / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def _smoothed_amax(sums_ptr, mean, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest magnitude of the keys minus their mean: rounding keeps the order of differences.

    It is infinite where a mean is not finite, since a maximum may leave out NaN.
    """
    parts, columns = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    places = sums_ptr + BLOCK + parts[:, None] * 3 * BLOCK + columns[None, :]
    lowest, highest = tl.min(tl.load(places), 0), tl.max(tl.load(places + BLOCK), 0)
    largest = tl.maximum(highest - mean, mean - lowest)
    return tl.max(tl.where(tl.abs(mean) < float("inf"), largest, float("inf")), 0)


@triton.jit
def _store(target, x, scale, row, rows, token_stride, dim, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    places = target + row.to(tl.int64)[:, None] * token_stride + columns[None, :]
    tl.store(places, (x * scale).to(target.dtype.element_ty), (row < rows)[:, None] & (columns < dim)[None, :])


@triton.jit
def _cast_rows(
    source, target, mean, scale, token_stride, out_stride, order_ptr, count, rows, tiles, head_dim, dim, part, parts,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for number in range(part, tiles, parts):
        tile = tiles - 1 - number
        origin, inside = _origins(order_ptr, tile, count, HAS_MASK, ROWS)
        x = _load(source, origin, inside, token_stride, head_dim, BLOCK)
        x = tl.where(inside[:, None], x - mean[None, :], 0.0)
        _store(target, x, scale, tile * ROWS + tl.arange(0, ROWS), rows, out_stride, dim, BLOCK)


@triton.jit
def _cast_queries(
    source, target, shift_ptr, mean, softmax_scale, scale, token_stride, out_stride, length, tiles, head_dim, dim,
    part, parts, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for number in range(part, tiles, parts):
        row = (tiles - 1 - number) * ROWS + tl.arange(0, ROWS)
        x = _load(source, row, row < length, token_stride, head_dim, BLOCK)
        tl.store(shift_ptr + row, tl.sum(x * mean[None, :], 1) * softmax_scale, row < length)
        _store(target, x, scale, row, length, out_stride, dim, BLOCK)


@triton.jit(do_not_specialize=LENGTHS)
def _cast(
    q_ptr, k_ptr, v_ptr, order_ptr, num_keys_ptr, amax_ptr, sums_ptr, q_out, k_out, v_out, q_descale, k_descale,
    v_descale, shift_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, length,
    num_rows, num_tiles, num_row_tiles, heads, groups, head_dim, dim, softmax_scale,
    HAS_MASK: tl.constexpr, MIN_AMAX: tl.constexpr, PARTS: tl.constexpr, HEAD_PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write this part of a head in float8, and for q its scores with the keys' mean. The first part writes factors."""
    head, part, picture = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    amax_ptr += picture * (heads + 2 * groups) * PARTS
    sums_ptr += picture * groups * PARTS * 3 * BLOCK
    order_ptr, count = _attended(order_ptr, num_keys_ptr, picture, num_rows, HAS_MASK)
    if head < heads:
        each, group = heads // groups, head // (heads // groups)
        amax = _largest(amax_ptr + group * each * PARTS, each * PARTS, HEAD_PARTS)
        scale = _scale(amax, q_descale + picture * groups + group, part + head - group * each, MIN_AMAX)
        mean = _mean(sums_ptr + group * PARTS * 3 * BLOCK, count, PARTS, BLOCK)
        source, target = q_ptr + picture * q_batch + head * q_head, q_out + (picture * length * heads + head) * dim
        _cast_queries(
            source, target, shift_ptr + (picture * heads + head) * length, mean, softmax_scale, scale, q_token,
            heads * dim, length, num_tiles, head_dim, dim, part, PARTS, ROWS, BLOCK,
        )  # fmt: skip
    elif head < heads + groups:
        group = head - heads
        mean = _mean(sums_ptr + group * PARTS * 3 * BLOCK, count, PARTS, BLOCK)
        amax = _smoothed_amax(sums_ptr + group * PARTS * 3 * BLOCK, mean, PARTS, BLOCK)
        scale = _scale(amax, k_descale + picture * groups + group, part, MIN_AMAX)
        source, target = k_ptr + picture * k_batch + group * k_head, k_out + (picture * num_rows * groups + group) * dim
        _cast_rows(
            source, target, mean, scale, k_token, groups * dim, order_ptr, count, num_rows, num_row_tiles, head_dim,
            dim, part, PARTS, HAS_MASK, ROWS, BLOCK,
        )  # fmt: skip
    else:
        group, mean = head - heads - groups, tl.zeros((BLOCK,), tl.float32)
        amax = _largest(amax_ptr + head * PARTS, PARTS, PARTS)
        scale = _scale(amax, v_descale + picture * groups + group, part, MIN_AMAX)
        source, target = v_ptr + picture * v_batch + group * v_head, v_out + (picture * num_rows * groups + group) * dim
        _cast_rows(
            source, target, mean, scale, v_token, groups * dim, order_ptr, count, num_rows, num_row_tiles, head_dim,
            dim, part, PARTS, HAS_MASK, ROWS, BLOCK,
        )  # fmt: skip


def launch_heads(
    qkv: tuple[Tensor, Tensor, Tensor],
    order_BM: Tensor | None,
    num_keys_B: Tensor | None,
    out: tuple[Tensor, ...],
    min_amax: float,
) -> None:
    """Write ``fp8_heads.fused_heads`` into ``out``, the memory of an ``Fp8Inputs``."""
    q_BLHD, k_BMGD, v_BMGD = (x if x.stride(-1) == 1 else x.contiguous() for x in qkv)
    (batch, length, heads, head_dim), (_, num_rows, groups, _) = q_BLHD.shape, k_BMGD.shape
    dim, num_heads = out[0].shape[-1], heads + 2 * groups
    block = triton.next_power_of_2(dim)
    rows = TILE // block
    tiles, row_tiles = triton.cdiv(length, rows), triton.cdiv(num_rows, rows)
    parts = min(NUM_PARTS, triton.next_power_of_2(max(tiles, row_tiles)))
    amax_BHP = q_BLHD.new_empty((batch, num_heads, parts), dtype=torch.float32)
    sums_BGPD = q_BLHD.new_empty((batch, groups, parts, NUM_SUMS * block), dtype=torch.float32)
    strides = (stride for x in (q_BLHD, k_BMGD, v_BMGD) for stride in x.stride()[:3])
    has_mask = order_BM is not None
    order = (order_BM.contiguous(), num_keys_B) if order_BM is not None else (amax_BHP, amax_BHP)  # else unused
    inputs = (q_BLHD, k_BMGD, v_BMGD, *order, amax_BHP, sums_BGPD)
    numbers = (*strides, length, num_rows, tiles, row_tiles, heads, groups, head_dim)
    grid, shape = (num_heads, parts, batch), {"HAS_MASK": has_mask, "ROWS": rows, "BLOCK": block}
    _measure[grid](*inputs, *numbers, **shape, num_warps=NUM_WARPS)
    _cast[grid](
        *inputs, *out, *numbers, dim, float(head_dim**-0.5), MIN_AMAX=min_amax, PARTS=parts,
        HEAD_PARTS=triton.next_power_of_2(heads // groups * parts), **shape, num_warps=NUM_WARPS,
    )  # fmt: skip
