"""Passes over a clip's feature maps in channels-last memory (``frames``), in Triton.

Dims: B batch, F frames, H rows, W columns, C channels, N pairs of frames. A tile is a few pixels with all channels.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engines.fast.records import Edges, FrameProducts, Pairs

TILE = 2048
"""Elements of a tile."""
NUM_WARPS = 8
EDGES: dict[Edges, int] = {None: 0, "replicate": 1, "reflect": 2}
"""Kinds of pixels around a frame, as kernels know them."""
SIZES = ("pixels", "out_pixels", "pairs", "height", "width", "start", "frames")
"""Arguments whose values do not choose a kernel: all sizes have the kernels that a first small clip compiled."""


@triton.jit
def _places(pixels, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's columns, its places in a frame, and which of both exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside_C = columns < channels
    return columns, inside_C, row[:, None] * channels + columns[None, :], (row < pixels)[:, None] & inside_C[None, :]


@triton.jit
def _inner(place, size, EDGES: tl.constexpr):
    """Return the rows or columns of a frame whose values are at places from -1 to ``size``."""
    if EDGES == 1:
        place = tl.minimum(tl.maximum(place, 0), size - 1)
    else:
        place = tl.abs(place)
        place = tl.where(place < size, place, 2 * size - 2 - place)
    return place


@triton.jit
def _sources(channels, height, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr):
    """Return where the frame has the values of this program's places, which have a pixel around it if ``EDGES``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if EDGES:
        y, x = row // (width + 2) - 1, row % (width + 2) - 1
        row = _inner(y, height, EDGES) * width + _inner(x, width, EDGES)
    return row[:, None] * channels + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _normed(x, weight, factor, eps, SILU: tl.constexpr):
    norm = tl.maximum(tl.sqrt(tl.sum(x * x, 1) + eps), 1e-12)  # the limit of torch.nn.functional.normalize
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
    x = _normed(x, tl.load(weight_ptr + columns, inside_C, 0.0).to(tl.float32), factor, 0.0, SILU)
    tl.store(out_ptr + entry * out_pixels * channels + places, x.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _add(x_ptr, bias_ptr, residual_ptr, pixels, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    x = tl.load(x_ptr + places, inside, 0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
    x += tl.load(residual_ptr + places, inside, 0.0).to(tl.float32)
    tl.store(x_ptr + places, x.to(x_ptr.dtype.element_ty), inside)


@triton.jit
def _frame(x_ptr, number, frame, places, inside):
    return tl.load(x_ptr + number * frame + places, inside, 0.0).to(tl.float32)


@triton.jit
def _two_frames(a_ptr, b_ptr, c_ptr, d_ptr, number, frame, places, inside):
    """Return both frames of a pair from four products."""
    b, c = _frame(b_ptr, number, frame, places, inside), _frame(c_ptr, number, frame, places, inside)
    even = _frame(a_ptr, number, frame, places, inside) + b + c
    return even, b - c - _frame(d_ptr, number, frame, places, inside)


@triton.jit
def _prepared(x, bias, weight, factor, eps, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr):
    if HAS_BIAS:
        x += bias[None, :]
    if HAS_NORM:
        x = _normed(x, weight, factor, eps, True)
    return x


@triton.jit
def _store_inputs(target, part, before, last, even, odd, inside):
    """Write what the four products read of four frames in a row."""
    dtype = target.dtype.element_ty
    tl.store(target, (before - even).to(dtype), inside)
    tl.store(target + part, (last + even).to(dtype), inside)
    tl.store(target + 2 * part, (even - last).to(dtype), inside)
    tl.store(target + 3 * part, (last - odd).to(dtype), inside)


@triton.jit
def _vector(ptr, columns, inside_C, EXISTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a value for each channel, or zeros."""
    values = tl.zeros((BLOCK,), tl.float32)
    if EXISTS:
        values = tl.load(ptr + columns, inside_C, 0.0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=SIZES)
def _split(
    a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, weight_ptr, earlier_ptr, out_ptr, last_ptr,
    pixels, channels, height, width, pairs, start, frames, factor, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    ARE_PRODUCTS: tl.constexpr, EARLIER: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Go through the pairs of one entry of the batch; each program has its own pixels."""
    entry = tl.program_id(1).to(tl.int64)
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    sources = _sources(channels, height, width, ROWS, BLOCK, EDGES)
    frame, out_frame = tl.cast(height, tl.int64) * width * channels, tl.cast(pixels, tl.int64) * channels
    part = tl.num_programs(1).to(tl.int64) * pairs * out_frame
    bias = _vector(bias_ptr, columns, inside_C, HAS_BIAS, BLOCK)
    weight = _vector(weight_ptr, columns, inside_C, HAS_NORM, BLOCK)
    before = tl.zeros((ROWS, BLOCK), tl.float32)
    if EARLIER == 0:
        before = _frame(a_ptr, entry * frames + tl.maximum(start - 2, 0), frame, sources, inside)
        last = _frame(a_ptr, entry * frames + tl.maximum(start - 1, 0), frame, sources, inside)
        before = _prepared(before, bias, weight, factor, eps, HAS_BIAS, HAS_NORM)
        last = _prepared(last, bias, weight, factor, eps, HAS_BIAS, HAS_NORM)
    else:
        last = _frame(earlier_ptr, EARLIER * entry + EARLIER - 1, out_frame, places, inside)
    if EARLIER == 2:
        before = _frame(earlier_ptr, 2 * entry, out_frame, places, inside)
    for pair in range(pairs):
        number, newest = entry * pairs + pair, start + 2 * pair + 1
        if ARE_PRODUCTS:
            even, odd = _two_frames(a_ptr, b_ptr, c_ptr, d_ptr, number, frame, sources, inside)
        else:
            even = _frame(a_ptr, entry * frames + tl.minimum(newest - 1, frames - 1), frame, sources, inside)
            odd = _frame(a_ptr, entry * frames + tl.minimum(newest, frames - 1), frame, sources, inside)
        even = _prepared(even, bias, weight, factor, eps, HAS_BIAS, HAS_NORM)
        odd = _prepared(odd, bias, weight, factor, eps, HAS_BIAS, HAS_NORM)
        _store_inputs(out_ptr + number * out_frame + places, part, before, last, even, odd, inside)
        before, last = tl.where(newest < frames, even, last), tl.where(newest < frames, odd, even)
    tl.store(last_ptr + 2 * entry * out_frame + places, before.to(last_ptr.dtype.element_ty), inside)
    tl.store(last_ptr + (2 * entry + 1) * out_frame + places, last.to(last_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _merge(
    a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, residual_ptr, out_ptr, pixels, channels, pairs, start, frames,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1).to(tl.int64)
    columns, inside_C, places, inside = _places(pixels, channels, ROWS, BLOCK)
    frame = tl.cast(pixels, tl.int64) * channels
    even, odd = _two_frames(a_ptr, b_ptr, c_ptr, d_ptr, number, frame, places, inside)
    bias = tl.load(bias_ptr + columns, inside_C, 0.0).to(tl.float32)[None, :]
    even += bias
    odd += bias
    first = start + 2 * (number % pairs)
    places += (number // pairs * frames + first) * frame
    has_odd = inside & (first + 1 < frames)
    if HAS_RESIDUAL:
        even += tl.load(residual_ptr + places, inside, 0.0).to(tl.float32)
        odd += tl.load(residual_ptr + frame + places, has_odd, 0.0).to(tl.float32)
    tl.store(out_ptr + places, even.to(out_ptr.dtype.element_ty), inside)
    tl.store(out_ptr + frame + places, odd.to(out_ptr.dtype.element_ty), has_odd)


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
    x: Tensor | FrameProducts,
    weight_C: Tensor | None,
    bias_C: Tensor | None,
    earlier_BFPQC: Tensor | None,
    *,
    pairs: Pairs | None = None,
    eps: float = 0.0,
    edges: Edges = None,
) -> tuple[Tensor, Tensor]:
    sources, are_products = ((x,) * 4, False) if isinstance(x, Tensor) else (x, True)
    _check(*sources, *(() if earlier_BFPQC is None else (earlier_BFPQC,)))
    *_, height, width, channels = sources[0].shape
    batch = len(sources[0]) if earlier_BFPQC is None else len(earlier_BFPQC)
    num_frames = 2 * len(sources[0]) // batch if are_products else sources[0].shape[1]
    pairs = Pairs(number=num_frames // 2) if pairs is None else pairs
    assert edges != "reflect" or min(height, width) > 1, "a frame of one row has no other to reflect"
    border = 2 if edges else 0
    out_4NPQC = sources[0].new_empty(4, batch * pairs.number, height + border, width + border, channels)
    last_BFPQC = sources[0].new_empty(batch, 2, *out_4NPQC.shape[2:])
    pixels, block, rows = _tiles(last_BFPQC[0, 0], channels)
    _split[(triton.cdiv(pixels, rows), batch)](
        *sources, bias_C, weight_C, earlier_BFPQC, out_4NPQC, last_BFPQC,
        pixels, channels, height, width, pairs.number, pairs.start, num_frames, channels**0.5, eps * channels,
        ROWS=rows, BLOCK=block, HAS_BIAS=bias_C is not None, HAS_NORM=weight_C is not None, ARE_PRODUCTS=are_products,
        EARLIER=0 if earlier_BFPQC is None else earlier_BFPQC.shape[1], EDGES=EDGES[edges], num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_4NPQC, last_BFPQC


def launch_merge(
    products: FrameProducts, bias_C: Tensor, residual_BFHWC: Tensor | None, out_BFHWC: Tensor, start: int = 0
) -> None:
    _check(*products, out_BFHWC, *(() if residual_BFHWC is None else (residual_BFHWC,)))
    batch, num_frames, channels = *out_BFHWC.shape[:2], out_BFHWC.shape[-1]
    pixels, block, rows = _tiles(out_BFHWC[0, 0], channels)
    _merge[(triton.cdiv(pixels, rows), len(products[0]))](
        *products, bias_C, residual_BFHWC, out_BFHWC, pixels, channels, len(products[0]) // batch, start, num_frames,
        ROWS=rows, BLOCK=block, HAS_RESIDUAL=residual_BFHWC is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


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
