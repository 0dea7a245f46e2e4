"""How ``FluxTransformer2DModel`` is split: tokens of both streams over ranks, or heads and MLP features.

The modulation layers, the embedders and the per-head norms stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard

TEXT, IMAGE = "text", "image"
DUAL, SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
MLP_RATIO = 4
"""Width of the MLP of a block over the width of its attention, fixed in diffusers' class."""

SHARDS = (
    TokenShard(module="", where="input", key="hidden_states", dim=1, stream=IMAGE),
    TokenShard(module="", where="input", key="encoder_hidden_states", dim=1, stream=TEXT),
    TokenShard(module="", where="input", key="img_ids", dim=0, stream=IMAGE),
    TokenShard(module="", where="input", key="txt_ids", dim=0, stream=TEXT),
)

DUAL_LINEARS: tuple[ColumnLinear | RowLinear, ...] = (
    *(ColumnLinear(pattern=f"{DUAL}.attn.{name}") for name in ("to_q", "to_k", "to_v")),
    *(ColumnLinear(pattern=f"{DUAL}.attn.{name}") for name in ("add_q_proj", "add_k_proj", "add_v_proj")),
    RowLinear(pattern=f"{DUAL}.attn.to_out.0"),
    RowLinear(pattern=f"{DUAL}.attn.to_add_out"),
    ColumnLinear(pattern=f"{DUAL}.ff.net.0.proj"),
    RowLinear(pattern=f"{DUAL}.ff.net.2"),
    ColumnLinear(pattern=f"{DUAL}.ff_context.net.0.proj"),
    RowLinear(pattern=f"{DUAL}.ff_context.net.2"),
)

SINGLE_LINEARS: tuple[ColumnLinear | RowLinear, ...] = (
    *(ColumnLinear(pattern=f"{SINGLE}.attn.{name}") for name in ("to_q", "to_k", "to_v")),
    ColumnLinear(pattern=f"{SINGLE}.proj_mlp"),
    RowLinear(pattern=f"{SINGLE}.proj_out", segments=(1, MLP_RATIO)),
)

SHARD_PLAN = ShardPlan(
    streams=(TEXT, IMAGE),
    blocks=("transformer_blocks", "single_transformer_blocks"),
    shards=SHARDS,
    gathers=(TokenGather(module="proj_out", dim=1, stream=IMAGE),),
    linears=(*DUAL_LINEARS, *SINGLE_LINEARS),
    carried=("encoder_hidden_states", "hidden_states"),
)


def stream_lengths(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of tokens of each stream in the whole (unsplit) inputs."""
    return {TEXT: inputs["encoder_hidden_states"].shape[1], IMAGE: inputs["hidden_states"].shape[1]}
