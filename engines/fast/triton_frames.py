"""Passes over a clip's feature maps in channels-last memory (``frames``), in Triton.

Dims: B batch, F frames, H rows, W columns, C channels, N pairs of frames. A tile is a few pixels with all channels.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.fast.records import FrameProducts

TILE = 2048
"""Elements of a tile."""
NUM_WARPS = 8
SIZES = ("pixels", "out_pixels", "pairs", "width")
"""Arguments whose values do not choose a kernel: all sizes have the kernels that a first small clip compiled."""


@triton.jit
def _places(pixels, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's columns, its places in a frame, and which of both exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside_C = columns < channels
    return columns, inside_C, row[:, None] * channels + columns[None, :], (row < pixels)[:, None] & inside_C[None, :]


@triton.jit
def _normed(x, weight, factor, SILU: tl.constexpr):
    norm = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)  # the limit of torch.nn.functional.normalize
    x = x * (factor / norm)[:, None] * weight[None, :]
    if SILU:
        x = x * tl.sigmoid(x)
    return x


@triton.jit(do_not_specialize=SIZES)
def _norm(
    x_ptr, bias_ptr, weight_ptr, out_ptr, pixels, out_pixels, channels, factor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(1).to(tl.int64)
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    x = tl.load(x_ptr + entry * pixels * channels + places, inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
    x = _normed(x, tl.load(weight_ptr + columns, inside_C, 0.0).to(tl.float32), factor, SILU)
    tl.store(out_ptr + entry * out_pixels * channels + places, x.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _add(x_ptr, bias_ptr, residual_ptr, pixels, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    x = tl.load(x_ptr + places, inside, 0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
    x += tl.load(residual_ptr + places, inside, 0.0).to(tl.float32)
    tl.store(x_ptr + places, x.to(x_ptr.dtype.element_ty), inside)


@triton.jit
def _two_frames(a_ptr, b_ptr, c_ptr, d_ptr, number, frame, places, inside, ARE_PRODUCTS: tl.constexpr):
    """Return both frames of a pair, from four products or as they lie in ``a``."""
    if ARE_PRODUCTS:
        b = tl.load(b_ptr + number * frame + places, inside, 0.0).to(tl.float32)
        c = tl.load(c_ptr + number * frame + places, inside, 0.0).to(tl.float32)
        even = tl.load(a_ptr + number * frame + places, inside, 0.0).to(tl.float32) + b + c
        odd = b - c - tl.load(d_ptr + number * frame + places, inside, 0.0).to(tl.float32)
    else:
        even = tl.load(a_ptr + 2 * number * frame + places, inside, 0.0).to(tl.float32)
        odd = tl.load(a_ptr + (2 * number + 1) * frame + places, inside, 0.0).to(tl.float32)
    return even, odd


@triton.jit(do_not_specialize=SIZES)
def _split(
    a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, weight_ptr, earlier_ptr, out_ptr, last_ptr, pixels, channels, pairs, factor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ARE_PRODUCTS: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """Go through the pairs of one entry of the batch; each program has its own pixels."""
    entry = tl.program_id(1).to(tl.int64)
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    frame = tl.cast(pixels, tl.int64) * channels
    part = tl.num_programs(1).to(tl.int64) * pairs * frame
    weight = tl.load(weight_ptr + columns, inside_C, 0.0).to(tl.float32)
    before = tl.zeros((ROWS, BLOCK), tl.float32)
    if EARLIER == 2:
        before = tl.load(earlier_ptr + 2 * entry * frame + places, inside, 0.0).to(tl.float32)
    newest = earlier_ptr + (EARLIER * entry + EARLIER - 1) * frame + places
    last = tl.load(newest, inside, 0.0).to(tl.float32)
    for pair in range(pairs):
        number = entry * pairs + pair
        even, odd = _two_frames(a_ptr, b_ptr, c_ptr, d_ptr, number, frame, places, inside, ARE_PRODUCTS)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
            even += bias
            odd += bias
        even, odd = _normed(even, weight, factor, True), _normed(odd, weight, factor, True)
        target = out_ptr + number * frame + places
        tl.store(target, (before - even).to(out_ptr.dtype.element_ty), inside)
        tl.store(target + part, (last + even).to(out_ptr.dtype.element_ty), inside)
        tl.store(target + 2 * part, (even - last).to(out_ptr.dtype.element_ty), inside)
        tl.store(target + 3 * part, (last - odd).to(out_ptr.dtype.element_ty), inside)
        before, last = even, odd
    tl.store(last_ptr + 2 * entry * frame + places, before.to(last_ptr.dtype.element_ty), inside)
    tl.store(last_ptr + (2 * entry + 1) * frame + places, last.to(last_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _merge(
    a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, residual_ptr, out_ptr, pixels, channels,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1).to(tl.int64)
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    frame = tl.cast(pixels, tl.int64) * channels
    even, odd = _two_frames(a_ptr, b_ptr, c_ptr, d_ptr, number, frame, places, inside, True)
    bias = tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
    places += 2 * number * frame
    even += bias + tl.load(residual_ptr + places, inside, 0.0).to(tl.float32)
    odd += bias + tl.load(residual_ptr + frame + places, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + places, even.to(out_ptr.dtype.element_ty), inside)
    tl.store(out_ptr + frame + places, odd.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _interleave(
    x_ptr, bias_ptr, out_ptr, pixels, channels, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Go through the four parts of one frame; each program has its own pixels."""
    frame = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside_C = columns < channels
    inside = (pixel < pixels)[:, None] & inside_C[None, :]
    y, x = (pixel // width).to(tl.int64), pixel % width
    bias = tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
    x_ptr += frame * (pixels // width + 1) * (width + 1) * channels * 4
    out_ptr += frame * pixels * channels * 4
    for part in tl.static_range(4):
        row, column = part // 2, part % 2
        source = ((y + row) * (width + 1) + x + column) * channels * 4 + part * channels
        target = ((2 * y + row) * width * 2 + 2 * x + column) * channels
        value = tl.load(x_ptr + source[:, None] + columns[None, :], inside, 0.0).to(tl.float32) + bias
        tl.store(out_ptr + target[:, None] + columns[None, :], value.to(out_ptr.dtype.element_ty), inside)


def launch_norm(x_BFHWC: Tensor, weight_C: Tensor, bias_C: Tensor | None, out_BFHWC: Tensor, *, silu: bool) -> None:
    _check(x_BFHWC, out_BFHWC[0])
    batch, channels = x_BFHWC.shape[0], x_BFHWC.shape[-1]
    pixels, block, rows = _tiles(x_BFHWC[0], channels)
    _norm[(triton.cdiv(pixels, rows), batch)](
        x_BFHWC, bias_C, weight_C, out_BFHWC, pixels, out_BFHWC.stride(0) // channels, channels, channels**0.5,
        ROWS=rows, BLOCK=block, HAS_BIAS=bias_C is not None, SILU=silu, num_warps=NUM_WARPS,
    )  # fmt: skip


def launch_add(x_BFHWC: Tensor, bias_C: Tensor, residual_BFHWC: Tensor) -> None:
    _check(x_BFHWC, residual_BFHWC)
    channels = x_BFHWC.shape[-1]
    pixels, block, rows = _tiles(x_BFHWC, channels)
    _add[(triton.cdiv(pixels, rows),)](
        x_BFHWC, bias_C, residual_BFHWC, pixels, channels, ROWS=rows, BLOCK=block, num_warps=NUM_WARPS
    )


def launch_split(
    x: Tensor | FrameProducts, weight_C: Tensor, bias_C: Tensor | None, earlier_BFHWC: Tensor
) -> tuple[Tensor, Tensor]:
    sources = (x,) * 4 if isinstance(x, Tensor) else x
    _check(*sources, earlier_BFHWC)
    batch, num_earlier, height, width, channels = earlier_BFHWC.shape
    pairs = sources[0].shape[1] // 2 if isinstance(x, Tensor) else len(sources[0]) // batch
    out_4NHWC = earlier_BFHWC.new_empty(4, batch * pairs, height, width, channels)
    last_BFHWC = earlier_BFHWC.new_empty(batch, 2, height, width, channels)
    pixels, block, rows = _tiles(earlier_BFHWC[0, 0], channels)
    _split[(triton.cdiv(pixels, rows), batch)](
        *sources, bias_C, weight_C, earlier_BFHWC, out_4NHWC, last_BFHWC, pixels, channels, pairs, channels**0.5,
        ROWS=rows, BLOCK=block, HAS_BIAS=bias_C is not None, ARE_PRODUCTS=not isinstance(x, Tensor),
        EARLIER=num_earlier, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_4NHWC, last_BFHWC


def launch_merge(products: FrameProducts, bias_C: Tensor, residual_BFHWC: Tensor) -> Tensor:
    _check(*products, residual_BFHWC)
    out_BFHWC, channels = torch.empty_like(residual_BFHWC), residual_BFHWC.shape[-1]
    pixels, block, rows = _tiles(residual_BFHWC[0, 0], channels)
    _merge[(triton.cdiv(pixels, rows), len(products[0]))](
        *products, bias_C, residual_BFHWC, out_BFHWC, pixels, channels, ROWS=rows, BLOCK=block, num_warps=NUM_WARPS
    )
    return out_BFHWC


def launch_interleave(parts_NHWE: Tensor, bias_C: Tensor) -> Tensor:
    _check(parts_NHWE)
    frames, height, width = (size - (dim > 0) for dim, size in enumerate(parts_NHWE.shape[:3]))
    channels = len(bias_C)
    out_NHWC = parts_NHWE.new_empty(frames, 2 * height, 2 * width, channels)
    pixels, block, rows = _tiles(out_NHWC[0, :height, :width], channels)
    _interleave[(triton.cdiv(pixels, rows), frames)](
        parts_NHWE, bias_C, out_NHWC, pixels, channels, width, ROWS=rows, BLOCK=block, num_warps=NUM_WARPS
    )
    return out_NHWC


def _check(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]


def _tiles(frames: Tensor, channels: int) -> tuple[int, int, int]:
    """Return the number of pixels, and a tile's columns and rows."""
    block = triton.next_power_of_2(channels)
    return frames.numel() // channels, block, max(1, TILE // block)
