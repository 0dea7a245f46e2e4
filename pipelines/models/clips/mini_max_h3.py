"""MiniMax-H3: clips with sound, from words and from a first and a last frame. All tokens are one packed sequence.

It guides itself. Of its two transformers the one that looks at references is not used: requests bring none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.models.architecture import Architecture, Config
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.kernel import Kernel
    from engines.core.model import Arguments

TOKENS = "tokens"
BLOCKS = "transformer_blocks"
REFINERS = "token_refiner.refiner_blocks.*.attn"
GATED = (1, 1)
"""What is gated, and its gate."""
TYPICAL_TOKENS = 300
"""Of a prompt, which may have any number."""
PREVIEW_LATENTS = 7
"""Latent frames: of fewer the auto-encoder makes nothing."""

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
    linears=(
        *(ColumnLinear(pattern=f"{BLOCKS}.*.attn.{name}") for name in ("to_q", "to_k", "to_v")),
        RowLinear(pattern=f"{BLOCKS}.*.attn.to_out.0"),
        ColumnLinear(pattern=f"{BLOCKS}.*.ff.net.0.proj", segments=GATED),
        RowLinear(pattern=f"{BLOCKS}.*.ff.net.2"),
    ),
    carried=("hidden_states",),
)


def stream_lengths(config: Config, arguments: Arguments) -> dict[str, int]:
    return {TOKENS: arguments["position_ids"].shape[0]}


def blank_conditioning(config: Config, num_tokens: int) -> Mapping[str, Tensor]:
    import torch

    num_tokens = num_tokens or TYPICAL_TOKENS
    tags = torch.ones(num_tokens, dtype=torch.long)
    return {"prompt_embeds": torch.zeros(1, num_tokens, config["text_dim"]), "text_token_tags": tags}


def blank(config: Config, call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    clip, sound = (call[name] for name in ("hidden_states", "audio_hidden_states"))
    return clip.new_zeros(()).expand(clip.shape), sound.new_zeros(()).expand(sound.shape)


def forward(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """The velocities of clip and sound, one after the other, (B, all values)."""
    import torch

    return torch.cat([velocity.flatten(1) for velocity in module(**call, return_dict=False)], dim=1)


def answer(config: Config, call: Mapping[str, Any], prediction: Tensor) -> tuple[Tensor, ...]:
    import torch

    forms = [x.shape for x in blank(config, call)]
    parts = torch.split(prediction, [form.numel() for form in forms], dim=1)
    return tuple(part.reshape(form) for part, form in zip(parts, forms, strict=True))


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Diffusers' processor splits features by the number of heads, of which a tensor-parallel rank holds a share."""
    from pipelines.blocks import attention

    attention.set_kernel(module, kernel, local=(REFINERS,))
    for inner in module.modules():
        each: Any = inner
        if hasattr(each, "to_q"):
            each.heads = each.to_q.out_features // each.head_dim


def estimate(loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
    """Rows of the frames that a clip begins and ends with have no noise, and come first."""
    if getattr(loop_state, "noise_pred", None) is None:
        return None
    latents, num_known = loop_state.latents.clone(), loop_state.num_condition_video_rows
    latents[num_known:] += sigma * loop_state.noise_pred[0, num_known:].float()
    return {"latents": latents}


def inputs(path: Path, request: MediaRequest) -> Mapping[str, Any]:
    """Diffusers counts the end of the last step as one. That there are pictures decides what ranks do as well."""
    pictures = dict.fromkeys(("image", "last_image")[: request.num_pictures], "shown")
    return {"num_inference_steps": request.num_inference_steps + 1, **pictures}


def blank_pictures(path: Path, request: MediaRequest) -> Mapping[str, Any]:
    import torch

    unit, channels = vae_scale(path), read_config(path, "vae").get("latent_channels", 24)
    shape = (1, channels, 1, request.height // unit, request.width // unit)
    return {
        "condition_latents": [torch.zeros(shape) for _ in range(request.num_pictures)],
        "keyframe_anchors": ("first", "last")[: request.num_pictures],
    }


def mend(blocks: Any) -> None:
    from pipelines.models.mended.mini_max_h3_steps import mend

    mend(blocks)


def vae_scale(path: Path) -> int:
    import math

    return math.prod(read_config(path, "vae").get("spatial_downsample_factors", (2, 2, 2, 2)))


def defaults(path: Path) -> Defaults:
    """What diffusers' blocks say. They make 5 + 17 n frames, of which a request may want fewer."""
    patch = read_config(path, "transformer").get("patch_size", (1, 2, 2))
    return Defaults(
        kind="video",
        width=1344,
        height=768,
        num_frames=124,
        fps=24,
        num_inference_steps=49,
        guidance_scale=0.0,
        true_cfg_scale=1.0,
        size_multiple=vae_scale(path) * patch[-1],
        frame_multiple=1,
        min_frames=120,
        max_pixels=1344 * 768,
        max_frames=345,
        max_steps=100,
        max_pictures=2,
    )


ARCHITECTURE = Architecture(
    family="minimax_h3",
    defaults=defaults,
    shard_plan=lambda config: SHARD_PLAN,
    stream_lengths=stream_lengths,
    blank_conditioning=blank_conditioning,
    blank_pictures=blank_pictures,
    frames_from_pictures=True,
    blank=blank,
    forward=forward,
    answer=answer,
    set_kernel=set_kernel,
    estimate=estimate,
    first_frame=lambda _, latents: {"latents": latents["latents"][:, :, :PREVIEW_LATENTS]},
    inputs=inputs,
    mend=mend,
    guides_itself=True,
    idle_parts=("transformer_ref",),
)
