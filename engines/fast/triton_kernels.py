"""Triton versions of ``kernels.py``: one program per row, the row in registers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.core.attention import heads_of_one
from engines.fast.records import ALIGNMENT, EPS, MAX_SUMS, HeadNorms, Modulation, QuantRows, Rows
from engines.quantization.linear import FP8, LARGEST, SMALLEST_AMAX

ROUNDED = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@cache
def _block(columns: int) -> int:
    """Return the size of a block. Triton's own function is slow, and a switch of weights calls it for each."""
    return int(triton.next_power_of_2(columns))


@triton.jit
def _quantize(
    x_ptr, out_ptr, scale_ptr, columns_each, group_stride, row_stride, channels,
    GELU: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    source = (columns // columns_each).to(tl.int64) * group_stride + row * row_stride + columns % columns_each
    x = tl.load(x_ptr + source, inside, 0.0).to(tl.float32)
    if GELU:
        # tanh form: x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    step = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST) / LARGEST
    tl.store(scale_ptr + row, step)
    tl.store(out_ptr + row * channels + columns, (x / step).to(out_ptr.dtype.element_ty), inside)


def launch_quantize(x_GRC: Tensor, *, gelu: bool) -> QuantRows:
    groups, rows, columns_each = x_GRC.shape
    channels = groups * columns_each
    assert x_GRC.stride(-1) == 1, x_GRC.stride()
    values_RC = torch.empty((rows, channels), device=x_GRC.device, dtype=FP8)
    scale_R1 = torch.empty((rows, 1), device=x_GRC.device, dtype=torch.float32)
    block = _block(channels)
    _quantize[(rows,)](
        x_GRC, values_RC, scale_R1, columns_each, x_GRC.stride(0), x_GRC.stride(1), channels,
        GELU=gelu, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return QuantRows(values_RC=values_RC, scale_R1=scale_R1)


NEVER = 2**31 - 1
"""First row of a weight that is not there."""
WEIGHT_FIELDS = tl.constexpr(4)
"""Numbers of a weight in the table."""


@triton.jit
def _quantize_weights(
    table_ptr, channels,
    WEIGHT: tl.constexpr, ROUNDED: tl.constexpr, ALIGNMENT: tl.constexpr, MAX_WEIGHTS: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row of one weight. All have ``channels``; bytes of rows and addresses are multiples of ALIGNMENT."""
    row = tl.program_id(0)
    first_rows = tl.load(table_ptr + tl.arange(0, MAX_WEIGHTS))
    is_before = first_rows <= row
    fields = table_ptr + MAX_WEIGHTS + (tl.sum(is_before.to(tl.int32), 0) - 1) * WEIGHT_FIELDS
    own_row = row - tl.max(tl.where(is_before, first_rows, 0), 0)
    source = tl.multiple_of(tl.load(fields).to(tl.pointer_type(WEIGHT)), ALIGNMENT)
    row_stride = tl.multiple_of(tl.load(fields + 1), ALIGNMENT)
    target = tl.multiple_of(tl.load(fields + 2).to(tl.pointer_type(tl.float8e4nv)), ALIGNMENT)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    x = tl.load(source + own_row * row_stride + columns, inside, 0.0).to(ROUNDED).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST) / LARGEST
    tl.store(tl.load(fields + 3).to(tl.pointer_type(tl.float32)) + own_row, step)
    tl.store(target + own_row * channels + columns, (x / step).to(tl.float8e4nv), inside)


def launch_weights(weights: Sequence[tuple[Tensor, torch.dtype, QuantRows]]) -> None:
    """Write ``kernels.quantize_weight`` of each: a weight, the dtype that it is rounded to, and its rows."""
    groups: dict[tuple[Any, ...], list[tuple[Tensor, QuantRows]]] = {}
    for weight_NK, rounded, into in weights:
        channels = weight_NK.shape[1]
        assert weight_NK.stride(1) == 1, weight_NK.stride()
        assert into.values_RC.stride() == (channels, 1), into.values_RC.stride()
        assert into.scale_R1.stride(0) == 1, into.scale_R1.stride()
        places = weight_NK.data_ptr() | into.values_RC.data_ptr() | weight_NK.stride(0) | channels
        key = weight_NK.device, channels, weight_NK.dtype, rounded, 1 if places % ALIGNMENT else ALIGNMENT
        groups.setdefault(key, []).append((weight_NK, into))
    for (device, channels, dtype, rounded, alignment), group in groups.items():
        for start in range(0, len(group), MAX_SUMS):
            some = group[start : start + MAX_SUMS]
            rows, fields = [len(into.values_RC) for _, into in some], array("q")
            firsts = [*accumulate(rows, initial=0)][:-1] + [NEVER] * (MAX_SUMS - len(some))
            for weight_NK, into in some:
                sources, targets = (weight_NK.data_ptr(), weight_NK.stride(0)), (into.values_RC, into.scale_R1)
                fields.extend((*sources, *(x.data_ptr() for x in targets)))
            table = torch.frombuffer(array("q", firsts) + fields, dtype=torch.int64).to(device, non_blocking=True)
            block = _block(channels)
            _quantize_weights[(sum(rows),)](
                table, channels, WEIGHT=ROUNDED[dtype], ROUNDED=ROUNDED[rounded], ALIGNMENT=alignment,
                MAX_WEIGHTS=MAX_SUMS, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip


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


@triton.jit
def _norm_rotate(
    qkv_ptr, out_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, first_rows, weight_seg, bias_which, batch, row_stride,
    which_stride, num_heads, heads_1, heads_2, out_start, out_token, out_batch, out_which, out_0, out_1, out_2, eps,
    TO_PEERS: tl.constexpr, HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1).to(tl.int64)
    token = row // batch
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, 2 * PAIRS)
    inside = (heads < num_heads)[:, None]
    source = row * row_stride + which * which_stride + heads[:, None] * (2 * PAIRS) + dims[None, :]
    values = tl.load(qkv_ptr + source, inside, 0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + which * bias_which + heads[:, None] * (2 * PAIRS) + dims[None, :], inside, 0.0)
        values = (values.to(tl.float32) + bias.to(tl.float32)).to(qkv_ptr.dtype.element_ty)
    if which < 2:
        x = values.to(tl.float32)
        segment = (row >= first_rows).to(tl.int64)
        weight = tl.load(weight_ptr + segment * weight_seg + which * (2 * PAIRS) + dims).to(tl.float32)
        spread = tl.rsqrt(tl.sum(x * x, 1) / (2 * PAIRS) + eps)
        x = x * spread[:, None] * weight[None, :]
        even, odd = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
        pairs = token * PAIRS + tl.arange(0, PAIRS)
        cos = tl.load(cos_ptr + pairs)[None, :]
        sin = tl.load(sin_ptr + pairs)[None, :]
        turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        values = tl.reshape(turned, [HEADS, 2 * PAIRS]).to(qkv_ptr.dtype.element_ty)
    # Head number h is (h // (n1 n2), h // n2 % n1, h % n2) in the destination's three head dims.
    outer, middle, inner = heads // (heads_1 * heads_2), heads // heads_2 % heads_1, heads % heads_2
    place = outer.to(tl.int64) * out_0 + middle.to(tl.int64) * out_1 + inner.to(tl.int64) * out_2
    target = out_start + token * out_token + (row % batch) * out_batch + which * out_which + place
    if TO_PEERS:  # out_ptr is a table of addresses, one a rank; the middle head dim is the rank
        addresses = tl.load(out_ptr + middle, heads < num_heads, 0)
        bases = tl.multiple_of(addresses.to(tl.pointer_type(qkv_ptr.dtype.element_ty)), 16)
        tl.store(bases[:, None] + (target[:, None] + dims[None, :]), values, inside)
    else:
        tl.store(out_ptr + target[:, None] + dims[None, :], values, inside)


def launch_norm_and_rotate(qkv_R3HD: Tensor, norms: HeadNorms, out_LB3HD: Tensor) -> None:
    rows, _, num_heads, dim = qkv_R3HD.shape
    while out_LB3HD.ndim < 7:
        out_LB3HD = out_LB3HD.unsqueeze(3)
    _, batch, _, _, heads_1, heads_2, _ = out_LB3HD.shape
    assert qkv_R3HD.stride()[2:] == (dim, 1), qkv_R3HD.stride()
    assert out_LB3HD.stride(-1) == 1, out_LB3HD.stride()
    assert dim & (dim - 1) == 0, f"head dim {dim} is not a power of two"
    in_place = out_LB3HD.data_ptr() == qkv_R3HD.data_ptr()
    token, entry, which, outer, middle, inner, _ = out_LB3HD.stride()
    _norm_rotate[(rows, 2 if in_place else 3)](
        qkv_R3HD, out_LB3HD, *_tables(qkv_R3HD, norms), batch, qkv_R3HD.stride(0), qkv_R3HD.stride(1), num_heads,
        heads_1, heads_2, 0, token, entry, which, outer, middle, inner, norms.eps,
        TO_PEERS=False, HAS_BIAS=norms.bias_3HD is not None, HEADS=_block(num_heads), PAIRS=dim // 2,
        num_warps=_num_warps(num_heads),
    )  # fmt: skip


def _num_warps(num_heads: int) -> int:
    return 8 if num_heads > 32 else 4


def _tables(qkv_R3HD: Tensor, norms: HeadNorms) -> tuple[Tensor | int, ...]:
    """Return the kernel's arguments from ``weight_ptr`` to ``bias_which``."""
    weight_S2D, bias_3HD = norms.weight_S2D, norms.bias_3HD
    segment = weight_S2D.stride(0) if weight_S2D.shape[0] > 1 else 0
    bias, which = (qkv_R3HD, 0) if bias_3HD is None else (bias_3HD, bias_3HD.stride(0))
    return weight_S2D, bias, norms.cos_LP, norms.sin_LP, norms.first_rows, segment, which


def launch_to_peers(qkv_R3HD: Tensor, norms: HeadNorms, batch: int, addresses_W: Tensor, first_token: int) -> None:
    """Write this rank's rows straight into the inbox of the rank that attends to each head.

    ``addresses_W`` (int64, on the device) are the inboxes of all ranks as this rank maps them. Each is contiguous (all
    tokens, B, 3, H / W rounded up, D); this rank writes the tokens from ``first_token``. Surplus heads stay unchanged.
    """
    rows, _, num_heads, dim = qkv_R3HD.shape
    each = heads_of_one(num_heads, addresses_W.shape[0])
    assert qkv_R3HD.stride()[2:] == (dim, 1), qkv_R3HD.stride()
    assert dim & (dim - 1) == 0, f"head dim {dim} is not a power of two"
    token = batch * 3 * each * dim
    _norm_rotate[(rows, 3)](
        qkv_R3HD, addresses_W, *_tables(qkv_R3HD, norms), batch, qkv_R3HD.stride(0), qkv_R3HD.stride(1), num_heads,
        addresses_W.shape[0], each, first_token * token, token, 3 * each * dim, each * dim, 0, 0, dim, norms.eps,
        TO_PEERS=True, HAS_BIAS=norms.bias_3HD is not None, HEADS=_block(num_heads), PAIRS=dim // 2,
        num_warps=_num_warps(num_heads),
    )  # fmt: skip


@triton.jit
def _residual_norm(
    x_ptr, y_ptr, z_ptr, gate_ptr, shift_ptr, scale_ptr, out_ptr, out_scale_ptr,
    first_rows, last_start, batch, channels, gate_seg, gate_batch, mod_seg, mod_batch, eps,
    NUM_UPDATES: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    entry = row % batch
    segment = (row >= first_rows).to(tl.int64) + (row >= last_start).to(tl.int64)
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
    """Return ``kernels.residual_norm_modulate``, or ``kernels.norm_modulate`` without updates."""
    rows, channels = x_RC.shape
    shift_SBC, scale_SBC = modulation.shift_SBC, modulation.scale_SBC
    gate_SBC = shift_SBC if gate_SBC is None else gate_SBC
    for vectors_SBC in (gate_SBC, shift_SBC, scale_SBC):
        assert vectors_SBC.stride(-1) == 1, vectors_SBC.stride()
        assert modulation.last_rows == 0 or vectors_SBC.shape[0] != 2, "the last rows have no segment"
    assert shift_SBC.stride() == scale_SBC.stride()
    assert all(tensor.is_contiguous() for tensor in (x_RC, *updates))
    out_RC = torch.empty_like(x_RC, dtype=FP8 if quantize else x_RC.dtype)
    out_scale_R1 = x_RC.new_empty((rows, 1) if quantize else (1, 1), dtype=torch.float32)
    y, z = (*updates, x_RC, x_RC)[:2]
    block = _block(channels)
    _residual_norm[(rows,)](
        x_RC, y, z, gate_SBC, shift_SBC, scale_SBC, out_RC, out_scale_R1,
        modulation.first_rows, rows - modulation.last_rows, shift_SBC.shape[1], channels,
        _segment_stride(gate_SBC), gate_SBC.stride(1), _segment_stride(shift_SBC), shift_SBC.stride(1), EPS,
        NUM_UPDATES=len(updates), QUANTIZE=quantize, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return QuantRows(values_RC=out_RC, scale_R1=out_scale_R1) if quantize else out_RC


def _segment_stride(x_SBC: Tensor) -> int:
    return x_SBC.stride(0) if x_SBC.shape[0] > 1 else 0


ROWS_PER_PROGRAM = 4


@triton.jit
def _push(
    x_ptr, addresses_ptr, rows, columns, target_row_stride, target_column, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    peer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    address = tl.load(addresses_ptr + peer).to(tl.pointer_type(x_ptr.dtype.element_ty))
    # The hint belongs to the pointer: on the integer it would be lost, and each store would be 2 bytes wide.
    address = tl.multiple_of(address, 16)
    x = tl.load(x_ptr + (peer * rows + row[:, None]) * columns + column[None, :], inside)
    tl.store(address + target_column + row[:, None] * target_row_stride + column[None, :], x, inside)


def push_columns(x_WRC: Tensor, addresses_W: Tensor, rank: int) -> None:
    """Write ``x[j]`` to rank j's inbox (R, W x C), into the columns of ``rank``."""
    world, rows, columns = x_WRC.shape
    assert x_WRC.is_contiguous(), x_WRC.stride()
    _push[(triton.cdiv(rows, ROWS_PER_PROGRAM), world)](
        x_WRC, addresses_W, rows, columns, world * columns, rank * columns,
        ROWS=ROWS_PER_PROGRAM, BLOCK=_block(columns), num_warps=4,
    )  # fmt: skip


@triton.jit
def _pre_post_norm(
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
    """Return ``kernels.add_normed``, or ``kernels.scaled_norm`` without an update."""
    rows, channels = x_RC.shape
    gate_BC = scale_BC if gate_BC is None else gate_BC
    assert gate_BC.stride(-1) == scale_BC.stride(-1) == 1, (gate_BC.stride(), scale_BC.stride())
    assert x_RC.is_contiguous()
    assert update_RC is None or update_RC.is_contiguous()
    out_RC = torch.empty_like(x_RC, dtype=FP8 if quantize else x_RC.dtype)
    out_scale_R1 = x_RC.new_empty((rows, 1) if quantize else (1, 1), dtype=torch.float32)
    block = _block(channels)
    _pre_post_norm[(rows,)](
        x_RC, x_RC if update_RC is None else update_RC, gate_BC, scale_BC, out_RC, out_scale_R1,
        scale_BC.shape[0], channels, gate_BC.stride(0), scale_BC.stride(0), eps,
        ADDS=update_RC is not None, QUANTIZE=quantize, LARGEST=LARGEST["fp8"], SMALLEST=SMALLEST_AMAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return QuantRows(values_RC=out_RC, scale_R1=out_scale_R1) if quantize else out_RC
