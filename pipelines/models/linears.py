"""Linear layers and norms of diffusers' ``Attention`` and ``FeedForward``, as a shard plan splits them.

Each function takes the names of attentions or MLPs (``transformer_blocks.*.attn``).
"""

from __future__ import annotations

from engines.core.shard_plan import ColumnLinear, FullWidthNorm, RowLinear

Linears = tuple[ColumnLinear | RowLinear, ...]

QUERY_KEY_VALUE = ("to_q", "to_k", "to_v")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
GATED = (1, 1)
"""Segments of a linear that outputs values and their gate."""


def attention_linears(*attentions: str) -> Linears:
    """Return the linears of self- or cross-attention."""
    return (
        *(ColumnLinear(pattern=f"{attention}.{name}") for attention in attentions for name in QUERY_KEY_VALUE),
        *(RowLinear(pattern=f"{attention}.to_out.0") for attention in attentions),
    )


def joint_attention_linears(*attentions: str) -> Linears:
    """Return the linears of joint attention over two sequences, each with weights of its own."""
    return (
        *attention_linears(*attentions),
        *(ColumnLinear(pattern=f"{attention}.{name}") for attention in attentions for name in ADDED),
        *(RowLinear(pattern=f"{attention}.to_add_out") for attention in attentions),
    )


def query_key_norms(*attentions: str) -> tuple[FullWidthNorm, ...]:
    """Return the norms of queries and keys over the features of all heads."""
    return tuple(
        FullWidthNorm(pattern=f"{attention}.{name}") for attention in attentions for name in ("norm_q", "norm_k")
    )


def mlp_linears(*mlps: str, segments: tuple[int, ...] = (1,)) -> Linears:
    """Return both linears of each MLP; ``segments`` as in ``ColumnLinear``."""
    return (
        *(ColumnLinear(pattern=f"{mlp}.net.0.proj", segments=segments) for mlp in mlps),
        *(RowLinear(pattern=f"{mlp}.net.2") for mlp in mlps),
    )
