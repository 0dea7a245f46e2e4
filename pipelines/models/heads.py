"""The number of heads of a rank that holds a share of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def count_heads(module: nn.Module) -> None:
    """Diffusers' processors split features by the number of heads, of which a tensor-parallel rank holds a share.

    Attentions that are not divided keep theirs.
    """
    for inner in module.modules():
        each: Any = inner
        if hasattr(each, "to_q"):
            each.head_dim = getattr(each, "head_dim", None) or each.inner_dim // each.heads
            each.heads = each.to_q.out_features // each.head_dim
