"""FLUX.3 and its distilled form (a flow map, which also takes the time that a step leads to).

Text, picture and reference pictures first attend within themselves, each in its own blocks, then all to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.latent_sizes import vae_scale
from pipelines.models.linears import GATED, attention_linears
from pipelines.models.spec import PICTURE, Config, ModelSpec, distilled, lazy
from pipelines.request import MediaRequest
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

TEXT, IMAGE, SEEN = "text", "image", "seen"
PATCH = 2
"""Latent values along the side of a token."""
MAX_TOKENS = 8192
TYPICAL_TOKENS = 80
"""Prompts are padded to multiples of it, and the padding is attended to."""

TEXT_BLOCKS, IMAGE_BLOCKS, SEEN_BLOCKS = "txt_mode_blocks", "mode_blocks.image", "mode_blocks.image_cond"
JOINT_BLOCKS = "single_transformer_blocks"
BLOCKS = (TEXT_BLOCKS, IMAGE_BLOCKS, SEEN_BLOCKS, JOINT_BLOCKS)
INPUTS = {
    IMAGE: (("hidden_states", 1), ("img_ids", 0)),
    TEXT: (("encoder_hidden_states", 1), ("txt_ids", 0)),
    SEEN: (("image_cond_hidden_states", 1), ("image_cond_ids", 0)),
}

SHARD_PLAN = ShardPlan(
    streams=(TEXT, IMAGE, SEEN),
    blocks=BLOCKS,
    shards=tuple(
        TokenShard(module="", where="input", key=key, dim=dim, stream=stream)
        for stream, keys in INPUTS.items()
        for key, dim in keys
    ),
    gathers=(TokenGather(module="proj_out", dim=1, stream=IMAGE),),
    linears=(
        *attention_linears(*(f"{block}.*.attn" for block in BLOCKS)),
        *(ColumnLinear(pattern=f"{block}.*.ff.linear_in", segments=GATED) for block in BLOCKS),
        *(RowLinear(pattern=f"{block}.*.ff.linear_out") for block in BLOCKS),
    ),
    alone=((TEXT_BLOCKS, TEXT), (IMAGE_BLOCKS, IMAGE), (SEEN_BLOCKS, SEEN)),
)


BASE = replace(PICTURE, true_cfg_scale=3.5, max_pictures=4, max_tokens=MAX_TOKENS)
"""Defaults of diffusers' blocks for the base model, and below for the distilled one."""
DISTILLED = replace(distilled(BASE, 16), takes_guidance=False)


class Flux3Spec(ModelSpec):
    family = "flux3"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    latents_per_channels = PATCH**2
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    plan = SHARD_PLAN
    counts_heads = True
    eager_split = "has blocks that see one stream of tokens alone"
    arrange_fast = lazy("pipelines.models.flux3.fast:Flux3Weights")
    patch_blocks = lazy("pipelines.models.flux3.patches:patch_blocks")

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {stream: arguments[key].shape[1] if key in arguments else 0 for stream, ((key, _), _) in INPUTS.items()}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        return {"prompt_embeds": torch.zeros(1, min(num_tokens, TYPICAL_TOKENS), config["joint_attention_dim"])}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return reference pictures in the request's size."""
        import torch

        side, channels = vae_scale(path) * PATCH, read_config(path, "transformer").get("cond_in_channels", 128)
        shape = (1, channels, request.height // side, request.width // side)
        return {"image_cond_latents": [torch.zeros(shape) for _ in range(request.num_pictures)]}

    def defaults(self, path: Path) -> Defaults:
        defaults = DISTILLED if read_config(path, "transformer").get("flow_map") else BASE
        return replace(defaults, size_multiple=vae_scale(path) * PATCH)


SPEC = Flux3Spec()
