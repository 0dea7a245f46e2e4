"""How ``WanTransformer3DModel`` is split: video tokens over ranks, or heads and MLP features.

The text stays whole on every rank (cross-attention needs all of it), as do the embedders and the modulation.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engines.core.shard_plan import ColumnLinear, FullWidthNorm, RowLinear, ShardPlan, TokenGather, TokenShard

VIDEO = "video"
ATTENTIONS = ("blocks.*.attn1", "blocks.*.attn2")

SHARDS = (
    TokenShard(module="rope", where="output", key=0, dim=1, stream=VIDEO),
    TokenShard(module="rope", where="output", key=1, dim=1, stream=VIDEO),
    TokenShard(module="blocks.0", where="input", key="hidden_states", dim=1, stream=VIDEO),
)
TIMESTEP_SHARD = TokenShard(module="", where="input", key="timestep", dim=1, stream=VIDEO)

LINEARS: tuple[ColumnLinear | RowLinear | FullWidthNorm, ...] = (
    *(ColumnLinear(pattern=f"{attn}.{name}") for attn in ATTENTIONS for name in ("to_q", "to_k", "to_v")),
    *(FullWidthNorm(pattern=f"{attn}.{name}") for attn in ATTENTIONS for name in ("norm_q", "norm_k")),
    *(RowLinear(pattern=f"{attn}.to_out.0") for attn in ATTENTIONS),
    ColumnLinear(pattern="blocks.*.ffn.net.0.proj"),
    RowLinear(pattern="blocks.*.ffn.net.2"),
)


def shard_plan(*, expand_timesteps: bool) -> ShardPlan:
    """The plan; with one timestep a token (``expand_timesteps``) the timesteps are cut like the tokens."""
    return ShardPlan(
        streams=(VIDEO,),
        blocks=("blocks",),
        shards=(*SHARDS, TIMESTEP_SHARD) if expand_timesteps else SHARDS,
        gathers=(TokenGather(module="proj_out", dim=1, stream=VIDEO),),
        linears=LINEARS,
        carried=("hidden_states",),
    )


class StreamLengths:
    """Number of video tokens in the whole (unsplit) inputs: patches of ``patch`` (frames, rows, columns)."""

    def __init__(self, patch: tuple[int, int, int]) -> None:
        self.patch = patch

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        frames, height, width = inputs["hidden_states"].shape[2:]
        return {VIDEO: (frames // self.patch[0]) * (height // self.patch[1]) * (width // self.patch[2])}
