"""Insert a kernel into diffusers' attention dispatcher, without replacing a model's attention processors.

Every attention processor calls ``dispatch_attention_fn`` with its queries, keys and values and its
``_parallel_config``. Here that configuration holds a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from engines.core.attention import EarlyKernel, Kernel, Prefix
from engines.core.shard_plan import LayerRule
from engines.fast.records import RotaryTables, RowNorm
from engines.fast.rotary import is_fusable, rotated_heads


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Value of a processor's ``_parallel_config`` that makes diffusers' dispatcher call our kernel."""

    kernel: Kernel
    """Attention on this rank, perhaps wrapped by a strategy."""


def set_kernel(module: nn.Module, kernel: Kernel, local: tuple[str, ...] = ()) -> None:
    """Set ``kernel`` for every attention inside ``module``, except those whose names match a pattern in ``local``.

    ValueError if no attention is left: the class does not use diffusers' dispatcher.
    """
    rules, num_attentions = [LayerRule(pattern=pattern) for pattern in local], 0
    for name, attention in module.named_modules():
        processor = getattr(attention, "processor", None)
        if processor is None or not hasattr(processor, "_parallel_config") or any(rule.matches(name) for rule in rules):
            continue
        for kind in type(processor).__mro__:  # a patched processor calls the one that it extends
            _route(sys.modules[kind.__module__])
        processor._parallel_config = KernelConfig(kernel)
        num_attentions += 1
    if not num_attentions:
        raise ValueError(f"no attention of {type(module).__name__} can be given a kernel")


class PrecomputedAttention:
    """Stands for ``attn`` in its processor, which gets some of queries, keys and values as they were made before.

    Their layers return these, and norms after them return their input. All other attributes are those of ``attn``.
    """

    fused_projections = False

    def __init__(self, attn: Any, **made_BLC: Tensor) -> None:
        """Wrap ``attn``. Names in ``made_BLC`` are "q", "k" and "v"."""
        self._attn = attn
        for name, x_BLC in made_BLC.items():
            setattr(self, f"to_{name}", partial(_first, x_BLC))
            setattr(self, f"norm_{name}", _first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attn, name)


def _first(x: Tensor, *_: Tensor) -> Tensor:
    return x


def row_norm(norm: nn.Module) -> RowNorm | None:
    """Return how the fused pass computes ``norm``; None if it cannot, as on a tensor axis that splits features."""
    if type(norm) is nn.RMSNorm and norm.eps is not None:
        return RowNorm(norm.weight, norm.normalized_shape[0], norm.eps)
    if type(norm) is RMSNorm and norm.bias is None:
        return RowNorm(norm.weight, norm.dim[0], norm.eps, rounded=True)
    return None


def can_rotate(attn: Any, x_BLC: Tensor) -> bool:
    """Return whether norms and rotation of queries and keys are to be one pass over them."""
    return is_fusable(x_BLC, row_norm(attn.norm_q), row_norm(attn.norm_k))


def fused_queries_and_keys(attn: Any, x_BLC: Tensor, tables: RotaryTables, dim: int) -> list[Tensor]:
    """Return ``q_BLHD`` and ``k_BLHD`` of self-attention, normalised and rotated in one pass."""
    norms = (row_norm(attn.norm_q), row_norm(attn.norm_k))
    return rotated_heads((attn.to_q(x_BLC), attn.to_k(x_BLC)), norms, tables, dim)


def rotate_heads(attn: Any, x_BLC: Tensor, tables: RotaryTables) -> PrecomputedAttention:
    """Return what stands for self-attention ``attn`` after that pass."""
    q_BLHD, k_BLHD = fused_queries_and_keys(attn, x_BLC, tables, attn.head_dim)
    return PrecomputedAttention(attn, q=q_BLHD.flatten(2), k=k_BLHD.flatten(2))


class SentKeys:
    """Stands for a processor whose keys and values are on their way: its dispatcher attends to these."""

    _attention_backend = None

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        def kernel(q_BLHD: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:  # neither masks nor prefixes
            return attend(q_BLHD), q_BLHD.new_empty(0)

        self._parallel_config = KernelConfig(cast(Kernel, kernel))


def rotate_and_send(processor: Any, attn: Any, x_BLC: Tensor, tables: RotaryTables) -> tuple[Any, PrecomputedAttention]:
    """Return what stands for ``processor`` and for self-attention ``attn`` after that pass, without a mask.

    The processor gives keys and values to its dispatcher as they are made.
    """
    config = processor._parallel_config
    kernel = config.kernel if isinstance(config, KernelConfig) else None
    if not isinstance(kernel, EarlyKernel):
        return processor, rotate_heads(attn, x_BLC, tables)
    attend, *heads = send_and_rotate(kernel, attn, x_BLC, tables, attn.head_dim)
    q_BLC, k_BLC, v_BLC = (x_BLHD.flatten(2) for x_BLHD in heads)
    return SentKeys(attend), PrecomputedAttention(attn, q=q_BLC, k=k_BLC, v=v_BLC)


def send_and_rotate(
    kernel: EarlyKernel, attn: Any, x_BLC: Tensor, tables: RotaryTables, dim: int
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor]:
    """Return attention to keys and values of ``x_BLC``, which travel while queries are made, and q, k, v, ``BLHD``."""
    k_BLHD = rotated(attn.to_k, attn.norm_k, x_BLC, tables, dim)
    v_BLHD = torch.unflatten(attn.to_v(x_BLC), 2, (-1, dim))
    attend = kernel.send(k_BLHD, v_BLHD, x_BLC)
    return attend, rotated(attn.to_q, attn.norm_q, x_BLC, tables, dim), k_BLHD, v_BLHD


def rotated(layer: nn.Module, norm: nn.Module, x_BLC: Tensor, tables: RotaryTables, dim: int) -> Tensor:
    """Return ``x_BLHD`` of one layer, normalised and rotated in one pass."""
    (x_BLHD,) = rotated_heads((layer(x_BLC),), (row_norm(norm),), tables, dim)
    return x_BLHD


def replace_processors(module: nn.Module, ours: Mapping[type[Any], type[Any]]) -> None:
    """Replace each processor of attention in ``module`` whose class has one of ours."""
    for part in module.modules():
        kind: Any = ours.get(type(getattr(part, "processor", None)))
        if kind is not None:
            part.processor = kind()


def unmasked(kernel: Kernel) -> Kernel:
    """Return ``kernel`` without its mask: one prompt needs none, and it rules out the fastest attention."""

    def attend(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        return kernel(q_BLHD, k_BMGD, v_BMGD, prefix=prefix)

    return attend


def dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor:
    """Replace diffusers' function of that name in the modules of processors with a ``KernelConfig``."""
    if not isinstance(parallel_config, KernelConfig):
        usual: Tensor = dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs,
            backend=backend, parallel_config=parallel_config,
        )  # fmt: skip
        return usual
    if is_causal:
        raise ValueError(
            "this model attends causally, and its processor does not give the places of its tokens: give it one that "
            "does (a kernel's `prefix`), or none of our kernels (`set_kernel` of its spec)"
        )
    key = key.to(query.dtype)  # some processors scale keys by a parameter that is kept in float32
    if scale is not None and scale != query.shape[-1] ** -0.5:
        query = query * (scale * query.shape[-1] ** 0.5)
    if attn_mask is None:
        return parallel_config.kernel(query, key, value)[0]
    return parallel_config.kernel(query, key, value, mask_BM=key_mask(attn_mask))[0]


def key_mask(mask: Tensor) -> Tensor:
    """Return ``mask_BM`` of keys from diffusers' (B, M) or (B, 1, 1, M), True where to attend."""
    assert mask.dtype == torch.bool, f"a bias on attention ({mask.dtype}) cannot be divided"
    if mask.ndim == 4:
        assert mask.shape[1:3] == (1, 1), f"a mask that varies by head or query ({tuple(mask.shape)}) cannot be divided"
        return mask[:, 0, 0]
    assert mask.ndim == 2, f"a mask of {mask.ndim} dims cannot be divided"
    return mask


def _route(module: ModuleType) -> None:
    if getattr(module, "dispatch_attention_fn", None) is dispatch_attention_fn:
        module.dispatch_attention_fn = dispatch  # type: ignore[attr-defined]


def count_heads(module: nn.Module) -> None:
    """Set ``heads`` of each attention to those of its (possibly tensor-parallel) query projection.

    Diffusers' processors split features by it.
    """
    for inner in module.modules():
        each: Any = inner
        if hasattr(each, "to_q"):
            each.head_dim = getattr(each, "head_dim", None) or each.inner_dim // each.heads
            each.heads = each.to_q.out_features // each.head_dim
