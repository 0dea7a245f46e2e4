"""Layers under the names that diffusers' ``Attention`` and ``FeedForward`` give them, as a shard plan splits them.

Each takes the names of attentions or MLPs (``transformer_blocks.*.attn``).
"""

from __future__ import annotations

from engines.core.shard_plan import ColumnLinear, FullWidthNorm, RowLinear

Linears = tuple[ColumnLinear | RowLinear, ...]

QUERY_KEY_VALUE = ("to_q", "to_k", "to_v")
JOINED = ("add_q_proj", "add_k_proj", "add_v_proj")
GATED = (1, 1)
"""Segments of a linear with a gate and what it gates."""


def attention_linears(*attentions: str) -> Linears:
    """Returns those of attention over one sequence, or to another."""
    return (
        *(ColumnLinear(pattern=f"{attention}.{name}") for attention in attentions for name in QUERY_KEY_VALUE),
        *(RowLinear(pattern=f"{attention}.to_out.0") for attention in attentions),
    )


def joint_attention_linears(*attentions: str) -> Linears:
    """Returns those of attention over two sequences together, the second of which has weights of its own."""
    return (
        *attention_linears(*attentions),
        *(ColumnLinear(pattern=f"{attention}.{name}") for attention in attentions for name in JOINED),
        *(RowLinear(pattern=f"{attention}.to_add_out") for attention in attentions),
    )


def query_key_norms(*attentions: str) -> tuple[FullWidthNorm, ...]:
    """Returns the norms of queries and keys that take the features of all heads together."""
    return tuple(
        FullWidthNorm(pattern=f"{attention}.{name}") for attention in attentions for name in ("norm_q", "norm_k")
    )


def mlp_linears(*mlps: str, segments: tuple[int, ...] = (1,)) -> Linears:
    """Returns both of each MLP; ``segments`` as in ``ColumnLinear``."""
    return (
        *(ColumnLinear(pattern=f"{mlp}.net.0.proj", segments=segments) for mlp in mlps),
        *(RowLinear(pattern=f"{mlp}.net.2") for mlp in mlps),
    )
