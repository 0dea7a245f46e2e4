"""RMS norm of queries and keys with their rotary embedding: by plain PyTorch, and in one pass by Triton on CUDA.

Dims: B batch, L tokens, C channels of all heads, H heads, D head dim, P pairs of a head that are rotated. The plain
version is the specification. Both round where diffusers does: the norm's result has the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.fast.records import RotaryTables
from engines.fast.triton_cache import has_triton

HAS_TRITON = has_triton()
"""Looked up here: a compiled graph cannot."""


def is_fusable(x_BLC: Tensor, *norms: nn.Module) -> bool:
    """Return whether ``rotated_heads`` is to replace ``norms`` and the rotation of their results.

    That is on CUDA, in 16 bits, and outside exports. A tensor-parallel rank may have norms of another class, whose
    features are on several ranks.
    """
    is_fast = x_BLC.is_cuda and x_BLC.dtype in (torch.bfloat16, torch.float16) and HAS_TRITON
    return is_fast and not torch.compiler.is_exporting() and all(type(norm) is nn.RMSNorm for norm in norms)


def rotated_heads(
    several: Sequence[Tensor], norms: Sequence[nn.Module], tables: RotaryTables, dim: int
) -> list[Tensor]:
    """Return ``x_BLHD``, contiguous, of one or two ``x_BLC``, each after its norm: over all heads, or over each one.

    The last dim of each ``x_BLC`` is contiguous. Both norms have the same epsilon and number of features.
    """
    first, *others = norms
    assert isinstance(first, nn.RMSNorm)
    assert first.eps is not None
    for other in others:
        assert isinstance(other, nn.RMSNorm)
        assert (other.normalized_shape, other.eps) == (first.normalized_shape, first.eps)
    weights = [norm.weight for norm in norms if norm.weight is not None]
    (features,) = first.normalized_shape
    cos, sin, interleaved, rounded = tables
    result: list[Tensor] = _run(list(several), weights, cos, sin, dim, features, first.eps, interleaved, rounded)
    return result


@torch.library.custom_op("troupe::rotated_heads", mutates_args=())
def _run(
    several: Sequence[Tensor], weights: Sequence[Tensor], cos_BLHP: Tensor, sin_BLHP: Tensor,
    dim: int, features: int, eps: float, interleaved: bool, rounded: bool,
) -> list[Tensor]:  # fmt: skip
    tables = RotaryTables(cos_BLHP, sin_BLHP, interleaved, rounded)
    if not several[0].is_cuda:
        return [
            plain_heads(x_BLC, weights[number] if weights else None, tables, dim, features, eps)
            for number, x_BLC in enumerate(several)
        ]
    from engines.fast.triton_rotary import launch_heads

    with torch.cuda.device(several[0].device):  # Triton launches on the current device, the thread's own
        return launch_heads(several, weights, tables, dim, features, eps)


@_run.register_fake
def _(
    several: Sequence[Tensor], weights: Sequence[Tensor], cos_BLHP: Tensor, sin_BLHP: Tensor,
    dim: int, features: int, eps: float, interleaved: bool, rounded: bool,
) -> list[Tensor]:  # fmt: skip
    return [x_BLC.new_empty(*x_BLC.shape[:2], x_BLC.shape[2] // dim, dim) for x_BLC in several]


def plain_heads(
    x_BLC: Tensor, weight: Tensor | None, tables: RotaryTables, dim: int, features: int, eps: float
) -> Tensor:
    """Return ``x_BLHD``. ``features`` are those that the norm takes together: C or D."""
    normed = functional.rms_norm(torch.unflatten(x_BLC, 2, (-1, features)), (features,), weight, eps)
    x_BLHD = torch.unflatten(normed.to(x_BLC.dtype).flatten(2), 2, (-1, dim))
    dtype = x_BLC.dtype if tables.rounded else torch.float32
    cos, sin = tables.cos_BLHP.to(dtype), tables.sin_BLHP.to(dtype)
    rotated, rest = torch.tensor_split(x_BLHD, [2 * cos.shape[-1]], dim=-1)
    pairs = torch.unflatten(rotated.to(dtype), -1, (-1, 2) if tables.interleaved else (2, -1))
    first, second = pairs.unbind(-1 if tables.interleaved else -2)
    turned = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(turned, dim=-1 if tables.interleaved else -2).flatten(-2)
    return torch.cat((both.to(x_BLC.dtype), rest), dim=-1)
