"""RMS norm of queries and keys with their rotary embedding: by plain PyTorch, and in one pass by Triton on CUDA.

Dims: B batch, L tokens, C channels of all heads, H heads, D head dim, P pairs of a head that are rotated. The plain
version is the specification. Both round where diffusers does: the norm's result has the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.tensors import is_exporting
from engines.fast.records import RotaryTables, RowNorm
from engines.fast.triton_cache import has_triton

HAS_TRITON = has_triton()
"""Looked up here: a compiled graph cannot."""


def is_fusable(x_BLC: Tensor, *norms: RowNorm | None) -> bool:
    """Return whether ``rotated_heads`` should replace ``norms`` and the rotation of their results.

    It replaces them on CUDA, in 16 bits, and outside exports.
    """
    dtype = x_BLC.dtype
    is_fast = x_BLC.is_cuda and dtype in (torch.bfloat16, torch.float16) and HAS_TRITON
    if not is_fast or is_exporting():
        return False
    return all(
        norm is not None and (not norm.rounded or norm.weight is None or norm.weight.dtype == dtype) for norm in norms
    )


def rotated_heads(
    several: Sequence[Tensor], norms: Sequence[RowNorm | None], tables: RotaryTables, dim: int
) -> list[Tensor]:
    """Return ``x_BLHD``, contiguous, of one or two ``x_BLC``, each after its norm, in heads of ``dim`` features.

    The last dim of each ``x_BLC`` is contiguous. The norms differ in their weights alone.
    """
    first, *others = norms
    assert first is not None
    assert all(other is not None and other[1:] == first[1:] for other in others)
    weights = [norm.weight for norm in norms if norm is not None and norm.weight is not None]
    assert len(weights) in (0, len(norms)), "weights of one norm alone"
    result: list[Tensor] = _run(list(several), weights, *first[1:], *tables, dim)
    return result


@torch.library.custom_op("troupe::rotated_heads", mutates_args=())
def _run(
    several: Sequence[Tensor], weights: Sequence[Tensor], features: int, eps: float, round_before_weight: bool,
    cos_BLHP: Tensor, sin_BLHP: Tensor, interleaved: bool, rounded: bool, dim: int,
) -> list[Tensor]:  # fmt: skip
    tables = RotaryTables(cos_BLHP, sin_BLHP, interleaved, rounded)
    some: Sequence[Tensor | None] = weights or [None] * len(several)
    norms = [RowNorm(weight, features, eps, round_before_weight) for weight in some]
    if not several[0].is_cuda:
        return [plain_heads(x_BLC, norm, tables, dim) for x_BLC, norm in zip(several, norms, strict=True)]
    from engines.fast.triton_rotary import launch_heads

    with torch.cuda.device(several[0].device):  # Triton launches on the current device, the thread's own
        return launch_heads(several, norms, tables, dim)


@_run.register_fake
def _(
    several: Sequence[Tensor], weights: Sequence[Tensor], features: int, eps: float, round_before_weight: bool,
    cos_BLHP: Tensor, sin_BLHP: Tensor, interleaved: bool, rounded: bool, dim: int,
) -> list[Tensor]:  # fmt: skip
    return [x_BLC.new_empty(*x_BLC.shape[:2], x_BLC.shape[2] // dim, dim) for x_BLC in several]


def plain_heads(x_BLC: Tensor, norm: RowNorm, tables: RotaryTables, dim: int) -> Tensor:
    """Return ``x_BLHD``."""
    grouped = torch.unflatten(x_BLC, 2, (-1, norm.features))
    normed = functional.rms_norm(grouped, (norm.features,), None if norm.rounded else norm.weight, norm.eps)
    if norm.rounded and norm.weight is not None:
        normed = normed * norm.weight
    x_BLHD = torch.unflatten(normed.flatten(2), 2, (-1, dim))
    dtype = x_BLC.dtype if tables.rounded else torch.float32
    cos, sin = tables.cos_BLHP.to(dtype), tables.sin_BLHP.to(dtype)
    rotated, rest = torch.tensor_split(x_BLHD, [2 * cos.shape[-1]], dim=-1)
    pairs = torch.unflatten(rotated.to(dtype), -1, (-1, 2) if tables.interleaved else (2, -1))
    first, second = pairs.unbind(-1 if tables.interleaved else -2)
    turned = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(turned, dim=-1 if tables.interleaved else -2).flatten(-2)
    return torch.cat((both.to(x_BLC.dtype), rest), dim=-1)
