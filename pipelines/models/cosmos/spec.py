"""Cosmos 3 (Nano, Super and models of the same layout): pictures, clips, and clips with sound, from words or a picture.

The transformer has two halves. The text's is computed once a job, whole on every rank. In the generating half, tokens
(the clip's, then the sound's) are divided and attend to the text's keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import part_class, read_config, read_index
from pipelines.latent_sizes import latent_sizes, space_time_scales
from pipelines.models.cosmos.call import (
    CLIP_SHAPE,
    LATENTS,
    NOISY_FRAMES,
    POSITIONS,
    SOUND_SHAPE,
    TEXT_IDS,
    TIMESTEP,
    as_output,
    grid,
    latents_of,
    num_sound_tokens,
)
from pipelines.models.spec import CLIP, Config, ModelSpec, blank_like, lazy
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

TEXT, GENERATED = "text", "generated"
TYPICAL_TOKENS = 300
"""The length of a prompt with the sentences that the pipeline adds."""
UNCUT_DIM = 2
"""A dim that the text's inputs lack: they tell its length and are not cut."""

MLPS = ("mlp", "mlp_moe_gen")
GATED = "silu"
"""``hidden_act`` of models whose MLPs have a gate."""

QUERIES, KEYS_AND_VALUES = ("to_q", "add_q_proj"), ("to_k", "to_v", "add_k_proj", "add_v_proj")
SHARDS = (
    TokenShard(module="", where="input", key=TEXT_IDS, dim=UNCUT_DIM, stream=TEXT),
    TokenShard(module="", where="input", key=POSITIONS, dim=UNCUT_DIM, stream=TEXT),
    TokenShard(module="rotary_emb", where="output", key=0, dim=1, stream=GENERATED),
    TokenShard(module="rotary_emb", where="output", key=1, dim=1, stream=GENERATED),
    TokenShard(module="layers.0", where="input", key="gen_seq", dim=0, stream=GENERATED),
    TokenShard(module="layers.*", where="input", key="und_seq", dim=2, stream=TEXT),
)


def makes_sound(path: Path) -> bool:
    has_tokenizer = part_class(path, "sound_tokenizer") is not None
    return has_tokenizer and bool(read_config(path, "transformer").get("sound_gen"))


class CosmosSpec(ModelSpec):
    family = "cosmos"
    dynamic_shapes = True
    latent_channels = ("latent_channel",)
    has_own_guidance = True
    decodes_frames_apart = True
    forward = lazy("pipelines.models.cosmos.attention:forward")
    set_kernel = lazy("pipelines.models.cosmos.attention:set_kernel")
    hoisted = lazy("pipelines.models.cosmos.attention:hoisted_text")
    """Keys and values of the text's half."""
    hoists_by_blocks = True

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Layers take keys and values in place of the text (``und_seq``)."""
        into, head = ("gate_proj", "up_proj") if config["hidden_act"] == GATED else ("up_proj",), config["head_dim"]
        return ShardPlan(
            streams=(TEXT, GENERATED),
            blocks=("layers",),
            shards=SHARDS,
            gathers=(TokenGather(module="norm_moe_gen", dim=0, stream=GENERATED),),
            linears=(
                *(ColumnLinear(pattern=f"layers.*.self_attn.{name}") for name in QUERIES),
                *(ColumnLinear(pattern=f"layers.*.self_attn.{name}", unit=head) for name in KEYS_AND_VALUES),
                *(RowLinear(pattern=f"layers.*.self_attn.{name}") for name in ("to_out", "to_add_out")),
                *(ColumnLinear(pattern=f"layers.*.{mlp}.{name}") for mlp in MLPS for name in into),
                *(RowLinear(pattern=f"layers.*.{mlp}.down_proj") for mlp in MLPS),
            ),
        )

    def hoisted_features(self, config: Config) -> Mapping[str, int]:
        """Return keys and values of all layers."""
        return {TEXT: 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])}

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        num_generated = math.prod(grid(config, arguments)) + num_sound_tokens(arguments)
        return {TEXT: arguments[TEXT_IDS].shape[0], GENERATED: num_generated}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Any]:
        """Return distinct token ids: the pipeline has no text encoder."""
        ids = [number % config["vocab_size"] for number in range(num_tokens or TYPICAL_TOKENS)]
        return {"cond_input_ids": ids, "uncond_input_ids": ids}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return an encoded clip whose first frame is given."""
        import torch

        channels, sizes = read_config(path, "vae")["z_dim"], latent_sizes(request, space_time_scales(path))
        return {"x0_tokens_vision": torch.zeros(1, channels, *sizes), "vision_condition_frames": [0]}

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return guidance, precision and sound of a request.

        The blocks call true guidance ``guidance_scale``. Without sound there are no tokens for it either.
        ``mixed_precision_format`` stops a search for ModelOpt layers in the transformer, which is elsewhere.
        """
        return {
            "guidance_scale": max(request.true_cfg_scale, 1.0),
            "mixed_precision_format": "none",
            "enable_sound": request.num_frames > 1 and request.sound is not False and makes_sound(path),
        }

    def complete_pipeline(self, pipeline: Any) -> None:
        """Add the guardrail, which the model's licence requires and no folder holds.

        ValueError if it is not installed, unless the folder's index turns it off.
        """
        if not pipeline.requires_safety_checker:
            return
        try:
            pipeline.enable_safety_checker()
        except ImportError as error:
            raise ValueError(
                "this model checks prompts and frames with cosmos_guardrail, which is not installed: run `pip install "
                'cosmos_guardrail`, or set "enable_safety_checker" to false in the index of the folder'
            ) from error

    def estimate_final(self, loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
        """Return the clip's estimate; the velocity of given frames is zero."""
        velocity, latents = getattr(loop_state, "velocity_vision", None), loop_state.latents
        return None if velocity is None else {"latents": latents - sigma * velocity}

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the clip's first frame, without sound."""
        return {"latents": latents["latents"][:, :, :1], "sound_latents": None}

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' pipeline and its page; distilled models have their own schedule."""
        (spatial, temporal), sigmas = space_time_scales(path), read_index(path).get("distilled_sigmas")
        return replace(
            CLIP,
            picture_width=CLIP.width,
            picture_height=CLIP.height,
            num_frames=189,
            num_inference_steps=len(sigmas) if sigmas else 35,
            true_cfg_scale=1.0 if sigmas else 6.0,
            takes_guidance=not sigmas,
            size_multiple=spatial,
            frame_multiple=temporal,
            max_frames=189,
            min_steps=len(sigmas) if sigmas else 1,
            max_steps=len(sigmas) if sigmas else 100,
            max_pictures=1,
            max_video_frames=189,
            make_sound=makes_sound(path),
        )

    def heads(self, config: Config) -> tuple[int, int]:
        return (config["num_attention_heads"], config["head_dim"])

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        """Return clip and sound in one tensor, ``latents_1N``; ``noisy_frames_F`` are latent frames that are not given.

        Inputs that no step changes are the same objects, so that engines recognise them.
        """
        import torch

        latents = latents_of(call)
        shapes = zip((CLIP_SHAPE, SOUND_SHAPE), (tuple(x.shape[-4:]) for x in latents), strict=False)
        return {
            LATENTS: torch.cat([x.flatten() for x in latents])[None],
            TIMESTEP: call["vision_timesteps"][:1],
            TEXT_IDS: call["input_ids"],
            POSITIONS: call["position_ids"],
            NOISY_FRAMES: call["vision_noisy_frame_indexes"][0],
            **dict(shapes),
        }

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> tuple[Any, ...]:
        return as_output([blank_like(x) for x in latents_of(call)])

    def to_output(self, config: Config, call: Mapping[str, Any], prediction: Tensor) -> tuple[Any, ...]:
        import torch

        latents = latents_of(call)
        parts = torch.split(prediction[0], [x.numel() for x in latents])
        return as_output([part.reshape(x.shape) for part, x in zip(parts, latents, strict=True)])


SPEC = CosmosSpec()
