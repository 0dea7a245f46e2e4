"""Group norm in channels-last memory: sums of parts of the rows, their combination, and the normalised rows.

Dims: B batch, P pixels, C channels, K parts of the pixels. A tile is a power of two of pixels with all channels.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

MAX_PARTS = 1024
"""Programs that sum, per picture: several for each multiprocessor, and few enough for one program to combine."""
TILE = 8192
"""Elements of a tile."""


@triton.jit
def _sums(x_ptr, mean_ptr, squares_ptr, pixels, channels, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mean and the sum of squared deviations of each channel over this part's pixels."""
    part, picture = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside_C = columns < channels
    start = part * tiles * ROWS
    source = x_ptr + picture * pixels * channels
    shift = tl.load(source + start * channels + columns, inside_C, 0.0).to(tl.float32)  # near the mean: no cancellation
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for tile in range(tiles):
        row = start + tile * ROWS + rows
        inside = (row < pixels)[:, None] & inside_C[None, :]
        x = tl.load(source + row[:, None] * channels + columns[None, :], inside, 0.0).to(tl.float32)
        x = tl.where(inside, x - shift[None, :], 0.0)
        total += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)
    count = tl.minimum(pixels - start, tiles * ROWS) * 1.0
    place = (picture * tl.num_programs(0) + part) * channels + columns
    tl.store(mean_ptr + place, shift + total / count, inside_C)
    tl.store(squares_ptr + place, squares - total * total / count, inside_C)


@triton.jit
def _combine(
    mean_ptr, squares_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, pixels, channels, parts, part_pixels, eps,
    EACH: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write the factor and the summand of each channel of one group."""
    group, picture = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns, numbers = tl.arange(0, BLOCK_C), tl.arange(0, PARTS)
    inside_C = columns < EACH
    channel = group * EACH + columns
    inside = (numbers < parts)[:, None] & inside_C[None, :]
    places = (picture * parts + numbers[:, None]) * channels + channel[None, :]
    counts = tl.minimum(pixels - numbers * part_pixels, part_pixels) * 1.0
    counts = tl.where(numbers < parts, counts, 0.0)
    means = tl.load(mean_ptr + places, inside, 0.0)
    squares = tl.load(squares_ptr + places, inside, 0.0)
    num = pixels * (EACH * 1.0)
    mean = tl.sum(tl.sum(means * counts[:, None], 1), 0) / num
    deviations = tl.where(inside, means - mean, 0.0)
    between = tl.sum(tl.sum(deviations * deviations * counts[:, None], 1), 0)
    variance = (tl.sum(tl.sum(squares, 1), 0) + between) / num
    scale = tl.zeros((BLOCK_C,), tl.float32) + 1.0 / tl.sqrt(variance + eps)
    shift = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_WEIGHT:
        scale *= tl.load(weight_ptr + channel, inside_C, 0.0).to(tl.float32)
        shift += tl.load(bias_ptr + channel, inside_C, 0.0).to(tl.float32)
    tl.store(scale_ptr + picture * channels + channel, scale, inside_C)
    tl.store(shift_ptr + picture * channels + channel, shift - mean * scale, inside_C)


@triton.jit
def _apply(
    x_ptr, out_ptr, scale_ptr, shift_ptr, pixels, channels,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside_C = columns < channels
    inside = (row < pixels)[:, None] & inside_C[None, :]
    scale = tl.load(scale_ptr + picture * channels + columns, inside_C, 0.0)
    shift = tl.load(shift_ptr + picture * channels + columns, inside_C, 0.0)
    places = picture * pixels * channels + row[:, None] * channels + columns[None, :]
    x = tl.load(x_ptr + places, inside, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if SILU:
        x = x * tl.sigmoid(x)
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), inside)


def launch_group_norm(x_BCHW: Tensor, norm: nn.GroupNorm, *, silu: bool) -> Tensor:
    x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)  # no copy for the output of a convolution
    batch, channels, height, width = x_BCHW.shape
    pixels, block = height * width, triton.next_power_of_2(channels)
    rows = max(1, TILE // block)
    tiles = triton.cdiv(triton.cdiv(pixels, rows), MAX_PARTS)
    parts = triton.cdiv(pixels, tiles * rows)
    mean_BKC, squares_BKC = x_BCHW.new_empty((2, batch, parts, channels), dtype=torch.float32)
    scale_BC, shift_BC = x_BCHW.new_empty((2, batch, channels), dtype=torch.float32)
    out_BCHW = torch.empty_like(x_BCHW)
    _sums[(parts, batch)](x_BCHW, mean_BKC, squares_BKC, pixels, channels, tiles, ROWS=rows, BLOCK=block, num_warps=8)
    each = channels // norm.num_groups
    _combine[(norm.num_groups, batch)](
        mean_BKC, squares_BKC, norm.weight, norm.bias, scale_BC, shift_BC, pixels, channels, parts, tiles * rows,
        norm.eps, EACH=each, BLOCK_C=triton.next_power_of_2(each), PARTS=triton.next_power_of_2(parts),
        HAS_WEIGHT=norm.weight is not None, num_warps=8,
    )  # fmt: skip
    _apply[(triton.cdiv(pixels, rows), batch)](
        x_BCHW, out_BCHW, scale_BC, shift_BC, pixels, channels, ROWS=rows, BLOCK=block, SILU=silu, num_warps=8
    )
    return out_BCHW
