"""MiniMax-H3: clips with sound, from words and from a first and a last frame. All tokens are one packed sequence.

It guides itself. Its second transformer, for references, is not used: requests bring none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.models.linears import GATED, attention_linears, mlp_linears
from pipelines.models.spec import CLIP, Config, SeveralOutputsSpec, blank_like, lazy
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

TOKENS = "tokens"
BLOCKS = "transformer_blocks"
REFINERS = "token_refiner.refiner_blocks.*.attn"
TYPICAL_TOKENS = 300
"""Tokens of a prompt for warm-up; a prompt may have any number."""
PREVIEW_LATENTS = 7
"""Least number of latent frames that the auto-encoder decodes."""

SHARD_PLAN = ShardPlan(
    streams=(TOKENS,),
    blocks=(BLOCKS,),
    shards=(
        TokenShard(module=f"{BLOCKS}.0", where="input", key="hidden_states", dim=1, stream=TOKENS),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="adaln_indices", dim=0, stream=TOKENS),
        TokenShard(module="norm_out", where="input", key="timestep_indices", dim=0, stream=TOKENS),
        TokenShard(module="rope", where="output", key=0, dim=0, stream=TOKENS),
        TokenShard(module="rope", where="output", key=1, dim=0, stream=TOKENS),
    ),
    gathers=tuple(TokenGather(module=name, dim=1, stream=TOKENS) for name in ("proj_out", "audio_proj_out")),
    linears=(*attention_linears(f"{BLOCKS}.*.attn"), *mlp_linears(f"{BLOCKS}.*.ff", segments=GATED)),
    carried=("hidden_states",),
)


def vae_scale(path: Path) -> int:
    return math.prod(read_config(path, "vae").get("spatial_downsample_factors", (2, 2, 2, 2)))


class MiniMaxH3Spec(SeveralOutputsSpec):
    family = "minimax_h3"
    plan = SHARD_PLAN
    local_attention = (REFINERS,)
    counts_heads = True
    fits_pictures = True
    has_own_guidance = True
    unused_parts = ("transformer_ref",)
    patch_blocks = lazy("pipelines.models.mini_max_h3.patches:patch_blocks")

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {TOKENS: arguments["position_ids"].shape[0]}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        num_tokens = num_tokens or TYPICAL_TOKENS
        tags = torch.ones(num_tokens, dtype=torch.long)
        return {"prompt_embeds": torch.zeros(1, num_tokens, config["text_dim"]), "text_token_tags": tags}

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return blank_like(call["hidden_states"]), blank_like(call["audio_hidden_states"])

    def estimate_final(self, loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
        """Return the estimate; rows of given first and last frames come first and have no noise."""
        if getattr(loop_state, "noise_pred", None) is None:
            return None
        latents, num_given = loop_state.latents.clone(), loop_state.num_condition_video_rows
        latents[num_given:] += sigma * loop_state.noise_pred[0, num_given:].float()
        return {"latents": latents}

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return one step more, as diffusers counts the end, and marks for given pictures, which ranks need."""
        pictures = dict.fromkeys(("image", "last_image")[: request.num_pictures], "shown")
        return {"num_inference_steps": request.num_inference_steps + 1, **pictures}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        import torch

        unit, channels = vae_scale(path), read_config(path, "vae").get("latent_channels", 24)
        shape = (1, channels, 1, request.height // unit, request.width // unit)
        return {
            "condition_latents": [torch.zeros(shape) for _ in range(request.num_pictures)],
            "keyframe_anchors": ("first", "last")[: request.num_pictures],
        }

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' blocks. They make 5 + 17 n frames, of which a request may want fewer."""
        patch = read_config(path, "transformer").get("patch_size", (1, 2, 2))
        return replace(
            CLIP,
            width=1344,
            height=768,
            num_frames=124,
            num_inference_steps=49,
            true_cfg_scale=1.0,
            size_multiple=vae_scale(path) * patch[-1],
            frame_multiple=1,
            min_frames=120,
            max_pixels=1344 * 768,
            max_frames=345,
            max_pictures=2,
            make_sound=True,
        )

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fewest latent frames that the auto-encoder decodes."""
        return {"latents": latents["latents"][:, :, :PREVIEW_LATENTS]}


SPEC = MiniMaxH3Spec()
