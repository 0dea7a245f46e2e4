"""FLUX.2 (dev, klein and models of the same layout). Reference pictures are tokens of the image stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index
from pipelines.latent_sizes import vae_scale
from pipelines.models.linears import GATED, joint_attention_linears
from pipelines.models.spec import PICTURE, Config, TextAndImageSpec, lazy
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.request import MediaRequest

TEXT, IMAGE = "text", "image"
PATCH = 2
"""Latent values along the side of a token."""
MAX_TOKENS = 512

SHARDS = (
    TokenShard(module="", where="input", key="hidden_states", dim=1, stream=IMAGE),
    TokenShard(module="", where="input", key="encoder_hidden_states", dim=1, stream=TEXT),
    TokenShard(module="", where="input", key="img_ids", dim=1, stream=IMAGE),
    TokenShard(module="", where="input", key="txt_ids", dim=1, stream=TEXT),
)
DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"
MLPS = ("ff", "ff_context")


DEV = replace(PICTURE, guidance_scale=4.0, guides_beside_negative=True, max_pictures=4, max_tokens=MAX_TOKENS)
"""The others differ in a few values (from their model cards on the hub)."""
INPAINTING: Mapping[str, Any] = {
    "takes_mask": True,
    "takes_strength": True,
    "strength": 0.8,
    "strength_needs_mask": True,
}
"""Only klein has inpainting in diffusers; the strength is its default."""
KLEIN = replace(DEV, num_inference_steps=4, guidance_scale=0.0, **INPAINTING)
KLEIN_BASE = replace(DEV, guidance_scale=0.0, true_cfg_scale=4.0, guides_beside_negative=False, **INPAINTING)


def _known_defaults(path: Path) -> Defaults:
    if read_config(path, "transformer").get("guidance_embeds", True):
        return DEV
    return KLEIN if read_index(path).get("is_distilled") else KLEIN_BASE


class Flux2Spec(TextAndImageSpec):
    family = "flux2"
    latent_channels = ("in_channels",)
    latents_per_channels = PATCH**2
    schedulers = ("euler", "unipc")
    schedules = (SIGMAS,)
    arrange_fast = lazy("pipelines.models.flux2.fast:Flux2Weights")
    patch_blocks = lazy("pipelines.models.flux2.patches:patch_blocks")

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Single-stream blocks have one input projection (q, k, v, MLP) and one output projection."""
        heads = config["num_attention_heads"] * config["attention_head_dim"]
        gated = int(heads * config["mlp_ratio"])
        return ShardPlan(
            streams=(TEXT, IMAGE),
            blocks=(DOUBLE, SINGLE),
            shards=SHARDS,
            gathers=(TokenGather(module="proj_out", dim=1, stream=IMAGE),),
            linears=(
                *joint_attention_linears(f"{DOUBLE}.*.attn"),
                *(ColumnLinear(pattern=f"{DOUBLE}.*.{mlp}.linear_in", segments=GATED) for mlp in MLPS),
                *(RowLinear(pattern=f"{DOUBLE}.*.{mlp}.linear_out") for mlp in MLPS),
                ColumnLinear(pattern=f"{SINGLE}.*.attn.to_qkv_mlp_proj", segments=(heads, heads, heads, gated, gated)),
                RowLinear(pattern=f"{SINGLE}.*.attn.to_out", segments=(heads, gated)),
            ),
        )

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        return {"prompt_embeds": torch.zeros(1, num_tokens, config["joint_attention_dim"])}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return pictures in the request's size: their tokens follow those of the result."""
        import torch

        unit, channels = vae_scale(path) * PATCH, read_config(path, "transformer")["in_channels"]
        shape = (1, channels, request.height // unit, request.width // unit)
        return {"image_latents": [torch.zeros(shape) for _ in range(request.num_pictures)]}

    def defaults(self, path: Path) -> Defaults:
        return replace(_known_defaults(path), size_multiple=vae_scale(path) * PATCH)


SPEC = Flux2Spec()
