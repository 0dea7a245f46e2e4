"""Helios: long clips in chunks of frames, each denoised with the ones before it as history.

A picture, or the last whole chunks of an input clip, is the history of the first chunk.

Tokens of the history come before the chunk's and are a stream of their own: only the chunk attends to the prompt. Two
of the three published models begin each chunk small and double its sides twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index
from pipelines.latent_sizes import space_time_scales
from pipelines.models.linears import attention_linears, mlp_linears, query_key_norms
from pipelines.models.spec import CLIP, Config, ModelSpec, distilled, lazy
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

HISTORY, CHUNK = "history", "chunk"
TOKENS = (HISTORY, CHUNK)
ATTENTIONS = ("blocks.*.attn1", "blocks.*.attn2")
PATCH_SCALES = {"latents_history_short": 1, "latents_history_mid": 2, "latents_history_long": 4}
"""Patch sides of the history's parts, in the chunk's: older parts are coarser."""
MAX_TOKENS = 512
CHUNK_LATENTS = 9
"""Latent frames of a chunk: the default of diffusers' blocks, and the models' training length."""
NUM_STAGES = 3

LINEARS = (*attention_linears(*ATTENTIONS), *query_key_norms(*ATTENTIONS), *mlp_linears("blocks.*.ffn"))


def _num_patches(sizes: Any, patch: Any) -> int:
    return math.prod(-(-size // side) for size, side in zip(sizes, patch, strict=True))


BASE = replace(
    CLIP,
    width=640,
    height=384,
    num_frames=129,
    max_frames=1449,
    max_pictures=1,
    max_video_frames=1449,
    max_tokens=MAX_TOKENS,
)
"""Defaults of diffusers' blocks for the three models. The longest clip lasts a minute, as designed."""
PYRAMID = replace(BASE, num_inference_steps=30, min_steps=NUM_STAGES)
DISTILLED = replace(distilled(PYRAMID, 6), first_chunk_steps=2)


def is_pyramid(path: Path) -> bool:
    return "Pyramid" in str(read_index(path).get("_class_name"))


class HeliosSpec(ModelSpec):
    family = "helios"
    latent_channels = ("out_channels",)
    local_attention = ("blocks.*.attn2",)
    counts_heads = True
    fits_pictures = True
    eager_only = "computes a part of itself under an autocast of its own"
    patch_blocks = lazy("pipelines.models.helios.patches:patch_blocks")
    replace_processors = lazy("pipelines.models.helios.patches:replace_processors")
    forward = lazy("pipelines.models.helios.patches:forward")
    hoisted = lazy("pipelines.models.helios.patches:hoisted_text")
    """The text's keys and values."""
    hoisted_inputs = ("encoder_hidden_states",)

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Linears stay whole if each head scales the history's keys by its own factor."""
        scales_heads = config["is_amplify_history"] and config["history_scale_mode"] == "per_head"
        return ShardPlan(
            streams=TOKENS,
            blocks=("blocks",),
            shards=(
                TokenShard(module="blocks.0", where="input", key="hidden_states", dim=1, stream=TOKENS),
                *(
                    TokenShard(module="blocks.*", where="input", key=key, dim=1, stream=TOKENS)
                    for key in ("temb", "rotary_emb")
                ),
                TokenShard(module="norm_out", where="input", key="temb", dim=1, stream=TOKENS),
                *(
                    TokenShard(module=module, where="input", key="original_context_length", dim=0, stream=CHUNK)
                    for module in ("blocks.*", "norm_out")
                ),
            ),
            gathers=(TokenGather(module="proj_out", dim=1, stream=CHUNK),),
            linears=() if scales_heads else LINEARS,
            carried=("hidden_states",),
        )

    def hoisted_numbers(self, config: Config) -> int:
        heads, dim = self.heads(config)
        return 2 * int(config["num_layers"]) * heads * dim * MAX_TOKENS

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        """Return the patches of history and chunk; a remainder at an edge is a patch too."""
        history = ((arguments[name].shape[2:], size) for name, size in PATCH_SCALES.items() if name in arguments)
        return {
            HISTORY: sum(
                _num_patches(sizes, [size * side for side in config["patch_size"]]) for sizes, size in history
            ),
            CHUNK: _num_patches(arguments["hidden_states"].shape[2:], config["patch_size"]),
        }

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        """Return a prompt of the maximum length: all are padded to it, and the padding is attended to."""
        import torch

        return {"prompt_embeds": torch.zeros(1, num_tokens, config["text_dim"])}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Tensor]:
        """Return the clip's first frame, and a frame of history like it."""
        import torch

        (spatial, _), channels = space_time_scales(path), read_config(path, "vae")["z_dim"]
        shape = (1, channels, 1, request.height // spatial, request.width // spatial)
        return {name: torch.zeros(shape) for name in ("image_latents", "fake_image_latents")}

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return the steps of each stage of a chunk; the first stages take the remainder."""
        if not is_pyramid(path):
            return {}
        each, more = divmod(request.num_inference_steps, NUM_STAGES)
        return {"pyramid_num_inference_steps_list": [each + (stage < more) for stage in range(NUM_STAGES)]}

    def round_values(self, loop_state: Any, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the current chunk in its full size."""
        from torch.nn.functional import interpolate

        latents, sides = call["hidden_states"], loop_state.latent_shape[-2:]
        chunk = (
            interpolate(latents.float(), size=(latents.shape[2], *sides)) if latents.shape[-2:] != sides else latents
        )
        return {"latent_chunks": [*loop_state.latent_chunks, chunk]}

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the first frame of the newest chunk."""
        return {"latent_chunks": [latents["latent_chunks"][-1][:, :, :1]]}

    def defaults(self, path: Path) -> Defaults:
        """Return the model's defaults. Sides of a chunk that begins small can be halved twice."""
        (spatial, temporal), defaults = space_time_scales(path), BASE
        patch = read_config(path, "transformer").get("patch_size", (1, 2, 2))
        if is_pyramid(path):
            index = read_index(path)
            is_distilled = index.get("is_distilled") or "Distilled" in index["_class_name"]
            defaults, spatial = DISTILLED if is_distilled else PYRAMID, spatial << NUM_STAGES - 1
        return replace(
            defaults,
            size_multiple=spatial * patch[-1],
            frame_multiple=temporal,
            frames_per_chunk=(chunk := 1 + (CHUNK_LATENTS - 1) * temporal),
            min_video_frames=chunk,
        )


SPEC = HeliosSpec()
