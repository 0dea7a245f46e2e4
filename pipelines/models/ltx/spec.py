"""LTX-Video.

The text stays whole on every rank (cross-attention needs all of it). A clip that begins with a picture has a timestep
for each token, 0 for the picture's. Other clips have one timestep for all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import FeatureTable, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.models.linears import attention_linears, mlp_linears, query_key_norms
from pipelines.models.spec import CLIP, Config, ModelSpec, first_latent_frame, lazy
from pipelines.request import MediaRequest
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

VIDEO = "video"
MAX_TOKENS = 128
"""The pipeline's own limit."""

TO_TEXT = "transformer_blocks.*.attn2"
ATTENTIONS = ("transformer_blocks.*.attn1", TO_TEXT)
LINEARS = (*attention_linears(*ATTENTIONS), *query_key_norms(*ATTENTIONS), *mlp_linears("transformer_blocks.*.ff"))


def vae_scales(path: Path) -> tuple[int, int]:
    """Return the pixels a side, and the frames, of one latent value."""
    vae = read_config(path, "vae")
    halvings: int = 2 ** sum(vae["spatio_temporal_scaling"])
    spatial: int = vae.get("spatial_compression_ratio") or vae["patch_size"] * halvings
    temporal: int = vae.get("temporal_compression_ratio") or vae["patch_size_t"] * halvings
    return spatial, temporal


class LTXSpec(ModelSpec):
    family = "ltx"
    latent_channels = ("in_channels",)
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    patch_blocks = lazy("pipelines.models.ltx.patches:patch_blocks")
    replace_processors = lazy("pipelines.models.ltx.patches:replace_processors")
    local_attention: tuple[str, ...] = (TO_TEXT,)
    counts_heads = True
    fits_pictures = True
    needs_negative = True
    first_frame = first_latent_frame

    def check_latents(self, config: Config, vae: Mapping[str, Any], path: Path) -> None:
        """Check the channels of tokens of one latent, as in all published models."""
        if config.get("patch_size", 1) == config.get("patch_size_t", 1) == 1:
            super().check_latents(config, vae, path)

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Norms and positions take the features of all heads."""
        return ShardPlan(
            streams=(VIDEO,),
            blocks=("transformer_blocks",),
            shards=(
                TokenShard(module="", where="input", key="hidden_states", dim=1, stream=VIDEO),
                TokenShard(module="", where="input", key="timestep", dim=1, stream=VIDEO),
                TokenShard(module="rope", where="output", key=0, dim=1, stream=VIDEO),
                TokenShard(module="rope", where="output", key=1, dim=1, stream=VIDEO),
            ),
            gathers=(TokenGather(module="proj_out", dim=1, stream=VIDEO),),
            linears=LINEARS,
            carried=("hidden_states",),
            tables=(FeatureTable(pattern="rope", dim=2),),
        )

    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        return {VIDEO: int(arguments["hidden_states"].shape[1])}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        return {
            "prompt_embeds": torch.zeros(1, num_tokens, config["caption_channels"]),
            "prompt_attention_mask": torch.ones(1, num_tokens, dtype=torch.bool),
        }

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Tensor]:
        import torch

        spatial, _ = vae_scales(path)
        channels = read_config(path, "vae")["latent_channels"]
        return {"image_latents": torch.zeros(1, channels, 1, request.height // spatial, request.width // spatial)}

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the call with one timestep for all tokens as a row of one."""
        timestep = call["timestep"]
        return {**call, "timestep": timestep[:, None]} if timestep.ndim == 1 else call

    def estimate_final(self, loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
        """Return the estimate; a first picture has no noise."""
        estimate, mask = super().estimate_final(loop_state, sigma), getattr(loop_state, "conditioning_mask", None)
        if estimate is None or mask is None:
            return estimate
        return {"latents": loop_state.latents.where(mask[..., None] > 0, estimate["latents"])}

    def defaults(self, path: Path) -> Defaults:
        """Return the card's (Lightricks/LTX-Video): sizes under 1280 x 720 and fewer than 257 frames work best."""
        spatial, temporal = vae_scales(path)
        return replace(
            CLIP,
            width=704,
            height=512,
            num_frames=161,
            fps=25,
            true_cfg_scale=3.0,
            size_multiple=spatial,
            frame_multiple=temporal,
            max_frames=257,
            max_pictures=1,
            max_tokens=MAX_TOKENS,
        )


SPEC = LTXSpec()
