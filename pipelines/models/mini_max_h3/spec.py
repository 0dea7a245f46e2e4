"""MiniMax-H3: clips with sound. All tokens are one packed sequence, and the model guides itself.

A folder with ``transformer`` makes them from words, and from a first and a last frame (workflows t2va, fl2va). One with
``transformer_ref`` alone makes them from references (ref2va): pictures and clips that the prompt names. The published
folder has both; a gang holds one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import part_class, read_config, read_index
from pipelines.models.linears import GATED, attention_linears, mlp_linears
from pipelines.models.spec import CLIP, Config, SeveralOutputsSpec, blank_like, lazy
from pipelines.recipes import Recipe
from pipelines.request import InputPictures, MediaRequest

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

WORDS, REFERENCES = "transformer", "transformer_ref"
"""Transformers of the workflows without and with references."""
REF2VA = "ref2va"
MAX_REFERENCE_PICTURES, MAX_REFERENCE_CLIPS = 9, 3
MIN_REFERENCE_FRAMES = 13
"""The text encoder sees two frames a second, and at least two of a clip."""
MAX_ASPECT = 4.0
"""Longest side of a reference, in times the other."""
RATE = 24
"""Frames a second of the model, and of an input clip, whatever the rate of the result."""
SOUND_RATE = 32_000
"""Samples a second that the sound's auto-encoder takes, unless its configuration says it."""
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


RECIPES: Mapping[str, Recipe] = {
    "turbo-4": Recipe(num_inference_steps=4, flow_shift=6.0),
    "turbo-8": Recipe(num_inference_steps=8),
}
"""Recipes for files of lightx2v/Minimax-h3-Turbo.

4 steps: minimax_h3_fl2v_turbo_4step_v1.1_768p_comfyui_bf16.safetensors, with a shift of 6 for the clip and 3 for the
sound, by its makers on the repository's page (discussions/42). 8 steps:
minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors, with the model's own shifts.
"""


def takes_references(path: Path) -> bool:
    """Return whether the folder has the transformer for references alone."""
    return part_class(path, WORDS) is None


def vae_scale(path: Path) -> int:
    return math.prod(read_config(path, "vae").get("spatial_downsample_factors", (2, 2, 2, 2)))


class MiniMaxH3Spec(SeveralOutputsSpec):
    family = "minimax_h3"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    shifts_schedule = True
    """Requests shift the clip's schedule; the sound's stays."""
    plan = SHARD_PLAN
    local_attention = (REFINERS,)
    counts_heads = True
    has_own_guidance = True
    reference_latents = "condition_latents"
    workflows = MappingProxyType({REF2VA: (WORDS,)})
    patch_blocks = lazy("pipelines.models.mini_max_h3.patches:patch_blocks")
    replace_processors = lazy("pipelines.models.mini_max_h3.patches:replace_processors")

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

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return those of adapters for words and for first and last frames."""
        return {} if takes_references(path) else RECIPES

    def unused_parts(self, path: Path) -> tuple[str, ...]:
        return () if takes_references(path) else (REFERENCES,)

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return one step more, as diffusers counts the end, and marks for the inputs, which ranks need."""
        names = ("references",) if takes_references(path) else ("image", "last_image")[: request.num_pictures]
        return {"num_inference_steps": request.num_inference_steps + 1, **dict.fromkeys(names, "shown")}

    def place_pictures(self, path: Path, request: MediaRequest, pictures: InputPictures) -> Mapping[str, Any]:
        """Return the references: pictures in their order, then the clips."""
        if not takes_references(path) or not (pictures.pictures or pictures.video):
            return {}
        from pipelines.models.mini_max_h3.references import references_of

        return {"references": references_of(pictures)}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        if takes_references(path):
            return self._blank_references(path, request)
        import torch

        unit, channels = vae_scale(path), read_config(path, "vae").get("latent_channels", 24)
        shape = (1, channels, 1, request.height // unit, request.width // unit)
        return {
            "condition_latents": [torch.zeros(shape) for _ in range(request.num_pictures)],
            "keyframe_anchors": ("first", "last")[: request.num_pictures],
        }

    def blank_video(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        return self._blank_references(path, request)

    def _blank_references(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return encoded references, and a prompt with the tokens that the text encoder has of them."""
        from pipelines.models.mini_max_h3.references import ReferenceSizes

        defaults = self.defaults(path)
        sizes = ReferenceSizes(
            request=request,
            vae=read_config(path, "vae"),
            audio_vae=read_config(path, "audio_vae"),
            index=read_index(path),
            multiple=defaults.size_multiple,
            rate=RATE,
            sound_rate=defaults.video_sound_rate,
        )
        num_tokens = TYPICAL_TOKENS + sizes.num_prompt_tokens
        return {**self.blank_conditioning(read_config(path, REFERENCES), num_tokens), **sizes.blank_values()}

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' blocks. They make 5 + 17 n frames, of which a request may want fewer."""
        has_references = takes_references(path)
        patch = read_config(path, REFERENCES if has_references else WORDS).get("patch_size", (1, 2, 2))
        common = replace(
            CLIP,
            width=1344,
            height=768,
            num_frames=124,
            fps=RATE,
            num_inference_steps=49,
            true_cfg_scale=1.0,
            takes_guidance=False,
            size_multiple=vae_scale(path) * patch[-1],
            frame_multiple=1,
            min_frames=120,
            max_pixels=1344 * 768,
            max_frames=345,
            make_sound=True,
        )
        if not has_references:
            return replace(common, max_pictures=2, fits_pictures=True)
        return replace(
            common,
            max_pictures=MAX_REFERENCE_PICTURES,
            max_video_frames=common.max_frames,
            min_video_frames=MIN_REFERENCE_FRAMES,
            video_fps=RATE,
            max_videos=MAX_REFERENCE_CLIPS,
            video_sound_rate=int(read_config(path, "audio_vae").get("sampling_rate", SOUND_RATE)),
            takes_both=True,
            needs_source=True,
            cuts_video=True,
            max_reference_aspect=MAX_ASPECT,
        )

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fewest latent frames that the auto-encoder decodes."""
        return {"latents": latents["latents"][:, :, :PREVIEW_LATENTS]}


SPEC = MiniMaxH3Spec()
