"""Stable Diffusion 3 and 3.5. Models with blocks that attend twice (3.5 medium) are not divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.latent_sizes import vae_scale
from pipelines.models.linears import joint_attention_linears, mlp_linears
from pipelines.models.makers_layers import LAST_LAYERS, OWN, MakersLayers, embedder, two_streams
from pipelines.models.spec import PICTURE, Config, ModelSpec, lazy, num_patches
from pipelines.request import MediaRequest
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

IMAGE, TEXT = "image", "text"
BLOCKS = "transformer_blocks"
MAX_TOKENS = 256
CLIP_TOKENS = 77
"""CLIP tokens of a prompt, which come before those of T5."""

SHARDS = (
    TokenShard(module="pos_embed", where="output", key=0, dim=1, stream=IMAGE),
    TokenShard(module="context_embedder", where="output", key=0, dim=1, stream=TEXT),
)
LINEARS = (*joint_attention_linears(f"{BLOCKS}.*.attn"), *mlp_linears(f"{BLOCKS}.*.ff", f"{BLOCKS}.*.ff_context"))

JOINT_BLOCK = r"joint_blocks\.(\d+)\."
NAMES = (r"{}\.attn\.qkv", r"{}\.attn\.proj", r"{}\.mlp\.fc1", r"{}\.mlp\.fc2", r"{}\.adaLN_modulation\.1")
MAKERS_LAYERS: MakersLayers = {
    **two_streams(JOINT_BLOCK, "x_block", "context_block", NAMES),
    rf"{JOINT_BLOCK}x_block\.attn2\.qkv": tuple(f"{OWN}attn2.to_{one}" for one in "qkv"),
    rf"{JOINT_BLOCK}x_block\.attn2\.proj": (f"{OWN}attn2.to_out.0",),
    r"x_embedder\.proj": ("pos_embed.proj",),
    "context_embedder": ("context_embedder",),
    **embedder("t_embedder", "timestep_embedder", (r"mlp\.0", r"mlp\.2")),
    **embedder("y_embedder", "text_embedder", (r"mlp\.0", r"mlp\.2")),
    **LAST_LAYERS,
}


MEDIUM = replace(
    PICTURE,
    num_inference_steps=28,
    true_cfg_scale=7.0,
    max_pictures=1,
    takes_strength=True,
    strength=0.6,
    max_tokens=MAX_TOKENS,
)
"""Stable Diffusion 3 medium; the others differ in a few values (from their model cards on the hub)."""
LARGE_35 = replace(MEDIUM, true_cfg_scale=3.5)
MEDIUM_35 = replace(MEDIUM, num_inference_steps=40, true_cfg_scale=4.5)


class SD3Spec(ModelSpec):
    family = "sd3"
    latent_channels = ("in_channels",)
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    makers_layers = MAKERS_LAYERS
    set_kernel = lazy("pipelines.models.sd3.attention:set_kernel")
    """Sets an own processor: diffusers' does not use its dispatcher."""

    def shard_plan(self, config: Config) -> ShardPlan:
        if config["dual_attention_layers"]:
            return ShardPlan(streams=(IMAGE, TEXT), blocks=(BLOCKS,), shards=(), gathers=(), linears=())
        gather = TokenGather(module="proj_out", dim=1, stream=IMAGE)
        return ShardPlan(streams=(IMAGE, TEXT), blocks=(BLOCKS,), shards=SHARDS, gathers=(gather,), linears=LINEARS)

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        num_image = num_patches(arguments["hidden_states"].shape[2:], (config["patch_size"],) * 2)
        return {IMAGE: num_image, TEXT: arguments["encoder_hidden_states"].shape[1]}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        return {
            "prompt_embeds": torch.zeros(1, CLIP_TOKENS + num_tokens, config["joint_attention_dim"]),
            "pooled_prompt_embeds": torch.zeros(1, config["pooled_projection_dim"]),
        }

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults: 3.5 normalises queries and keys; its medium has blocks that attend twice."""
        config = read_config(path, "transformer")
        known = MEDIUM if not config.get("qk_norm") else MEDIUM_35 if config.get("dual_attention_layers") else LARGE_35
        return replace(known, size_multiple=vae_scale(path) * config.get("patch_size", 2))

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return "" if no negative prompt is given, as diffusers' pipeline does and its blocks do not."""
        return {"negative_prompt": request.negative_prompt or ""} if request.true_cfg_scale > 1 else {}


SPEC = SD3Spec()
