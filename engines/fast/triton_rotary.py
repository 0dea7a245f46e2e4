"""Triton version of ``rotary``: one program per token, which reads its row, or its rows of queries and keys, once."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.fast.records import RotaryTables, RowNorm

ELEMENTS_PER_WARP = 512
MAX_WARPS = 4


@triton.jit
def _load(
    source, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Return the first and the second of each pair, and what is not rotated (anything if there is none), by head."""
    heads = tl.arange(0, HEADS)[:, None]
    row = source + heads * DIM
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(row + dims, (heads < NUM_HEADS) & (dims < 2 * NUM_PAIRS), 0.0)
        first, second = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        inside = (heads < NUM_HEADS) & (pairs < NUM_PAIRS)
        first = tl.load(row + pairs, inside, 0.0)
        second = tl.load(row + NUM_PAIRS + pairs, inside, 0.0)
    rest = first
    if REST > 0:
        dims = tl.arange(0, REST)[None, :]
        inside = (heads < NUM_HEADS) & (dims < DIM - 2 * NUM_PAIRS)
        rest = tl.load(row + 2 * NUM_PAIRS + dims, inside, 0.0)
    return first, second, rest


@triton.jit
def _store(
    target, first, second, rest, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)[:, None]
    row = target + heads * DIM
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), [HEADS, 2 * PAIRS])
        tl.store(row + dims, both, (heads < NUM_HEADS) & (dims < 2 * NUM_PAIRS))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        inside = (heads < NUM_HEADS) & (pairs < NUM_PAIRS)
        tl.store(row + pairs, first, inside)
        tl.store(row + NUM_PAIRS + pairs, second, inside)
    if REST > 0:
        dims = tl.arange(0, REST)[None, :]
        inside = (heads < NUM_HEADS) & (dims < DIM - 2 * NUM_PAIRS)
        tl.store(row + 2 * NUM_PAIRS + dims, rest, inside)


@triton.jit
def _rounded(x, like, ROUNDED: tl.constexpr):
    if ROUNDED:
        x = x.to(like.dtype).to(tl.float32)
    return x


@triton.jit
def _turn(
    x, weight_ptr, cos, sin, eps, HAS_WEIGHT: tl.constexpr, OVER_ALL: tl.constexpr, ROUNDED: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr, FEATURES: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Return the three parts of ``x`` after norm and rotation, in its dtype."""
    like, _, _ = x
    first, second, rest = x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if REST > 0:
        squares += tl.sum(rest * rest, 1)
    squares = tl.sum(squares, 0) if OVER_ALL else squares[:, None]
    scale = tl.rsqrt(squares / FEATURES + eps)
    first, second, rest = first * scale, second * scale, rest * scale
    if HAS_WEIGHT:
        first, second = _rounded(first, like, BEFORE_WEIGHT), _rounded(second, like, BEFORE_WEIGHT)
        rest = _rounded(rest, like, BEFORE_WEIGHT)
        if OVER_ALL:
            weights = _load(weight_ptr, NUM_HEADS, DIM, NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST)
        else:
            weights = _load(weight_ptr, 1, DIM, NUM_PAIRS, INTERLEAVED, 1, PAIRS, REST)
        first, second = first * weights[0].to(tl.float32), second * weights[1].to(tl.float32)
        if REST > 0:
            rest *= weights[2].to(tl.float32)
    first, second = first.to(like.dtype).to(tl.float32), second.to(like.dtype).to(tl.float32)
    turned = _rounded(first * cos, like, ROUNDED) - _rounded(second * sin, like, ROUNDED)
    second = _rounded(second * cos, like, ROUNDED) + _rounded(first * sin, like, ROUNDED)
    return turned.to(like.dtype), second.to(like.dtype), rest.to(like.dtype)


@triton.jit(do_not_specialize=["length"])
def _rotate(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length,
    q_batch, q_token, k_batch, k_token, table_batch, table_token, table_head, table_pair, eps,
    HAS_KEYS: tl.constexpr, HAS_WEIGHT: tl.constexpr, OVER_ALL: tl.constexpr, BY_HEAD: tl.constexpr,
    ROUNDED: tl.constexpr, BEFORE_WEIGHT: tl.constexpr, FEATURES: tl.constexpr, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, NUM_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Write a token's row of queries and, with the same tables, of keys. All is read before anything is computed."""
    row = tl.program_id(0).to(tl.int64)
    entry, token = row // length, row % length
    q = _load(
        q_ptr + entry * q_batch + token * q_token, NUM_HEADS, DIM, NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST
    )  # fmt: skip
    k = q
    if HAS_KEYS:
        k = _load(
            k_ptr + entry * k_batch + token * k_token, NUM_HEADS, DIM, NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST
        )  # fmt: skip
    heads, pairs = tl.arange(0, HEADS if BY_HEAD else 1)[:, None], tl.arange(0, PAIRS)[None, :]
    inside = (heads < NUM_HEADS) & (pairs < NUM_PAIRS)
    place = entry * table_batch + token * table_token + heads * table_head + pairs * table_pair
    cos = _rounded(tl.load(cos_ptr + place, inside, 0.0).to(tl.float32), q[0], ROUNDED)
    sin = _rounded(tl.load(sin_ptr + place, inside, 0.0).to(tl.float32), q[0], ROUNDED)
    first, second, rest = _turn(
        q, q_weight_ptr, cos, sin, eps, HAS_WEIGHT, OVER_ALL, ROUNDED, BEFORE_WEIGHT, FEATURES, NUM_HEADS, DIM,
        NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST,
    )  # fmt: skip
    target = row * NUM_HEADS * DIM
    _store(q_out_ptr + target, first, second, rest, NUM_HEADS, DIM, NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST)
    if HAS_KEYS:
        first, second, rest = _turn(
            k, k_weight_ptr, cos, sin, eps, HAS_WEIGHT, OVER_ALL, ROUNDED, BEFORE_WEIGHT, FEATURES, NUM_HEADS, DIM,
            NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST,
        )  # fmt: skip
        _store(k_out_ptr + target, first, second, rest, NUM_HEADS, DIM, NUM_PAIRS, INTERLEAVED, HEADS, PAIRS, REST)


def launch_heads(several: Sequence[Tensor], norms: Sequence[RowNorm], tables: RotaryTables, dim: int) -> list[Tensor]:
    """Return ``rotary.plain_heads`` of one or two tensors of the same shape."""
    q_BLC, k_BLC, norm = several[0], several[-1], norms[0]
    batch, length, channels = q_BLC.shape
    num_heads, num_pairs = channels // dim, tables.cos_BLHP.shape[-1]
    assert len(several) <= 2, len(several)
    assert q_BLC.shape == k_BLC.shape, (q_BLC.shape, k_BLC.shape)
    assert q_BLC.dtype == k_BLC.dtype, (q_BLC.dtype, k_BLC.dtype)
    assert q_BLC.stride(2) == k_BLC.stride(2) == 1, (q_BLC.stride(), k_BLC.stride())
    assert norm.features in (dim, channels), norm.features
    weights = [each.weight for each in norms if each.weight is not None] or [q_BLC]
    assert norm.weight is None or all(weight.is_contiguous() for weight in weights)
    results = [torch.empty((batch, length, num_heads, dim), dtype=x.dtype, device=x.device) for x in several]
    heads, pairs = triton.next_power_of_2(num_heads), triton.next_power_of_2(num_pairs)
    rest = dim - 2 * num_pairs
    cos_BLHP, sin_BLHP, *strides = _tables(tables, (batch, length, num_heads, num_pairs))
    _rotate[(batch * length,)](
        q_BLC, k_BLC, results[0], results[-1], weights[0], weights[-1], cos_BLHP, sin_BLHP, length,
        *q_BLC.stride()[:2], *k_BLC.stride()[:2], *strides, norm.eps,
        HAS_KEYS=len(several) == 2, HAS_WEIGHT=norm.weight is not None, OVER_ALL=norm.features == channels,
        BY_HEAD=cos_BLHP.shape[2] > 1, ROUNDED=tables.rounded, BEFORE_WEIGHT=norm.rounded, FEATURES=norm.features,
        NUM_HEADS=num_heads, DIM=dim, NUM_PAIRS=num_pairs, INTERLEAVED=tables.interleaved, HEADS=heads, PAIRS=pairs,
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=min(MAX_WARPS, max(1, 2 * heads * pairs // ELEMENTS_PER_WARP)),
    )  # fmt: skip
    return results


def _tables(tables: RotaryTables, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return both tables, with the same strides, and these strides, 0 where one value is for all of ``shape``."""
    cos_BLHP, sin_BLHP, *_ = tables
    if cos_BLHP.stride() != sin_BLHP.stride():
        cos_BLHP, sin_BLHP = cos_BLHP.contiguous(), sin_BLHP.contiguous()
    for table_BLHP in (cos_BLHP, sin_BLHP):
        for size, expected in zip(table_BLHP.shape, shape, strict=True):
            assert size in (1, expected), (table_BLHP.shape, shape)
    strides = (0 if size == 1 else stride for size, stride in zip(cos_BLHP.shape, cos_BLHP.stride(), strict=True))
    return cos_BLHP, sin_BLHP, *strides
