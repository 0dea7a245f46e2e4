"""LTX-2: a clip and its sound, as two streams of tokens that attend to each other (arXiv:2601.03233).

The sound has few tokens (25 a second), which stay whole on every rank, as the text does. They attend to the clip's,
which are split; all ranks compute the same from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, FeatureTable, ShardPlan, TokenGather, TokenShard
from pipelines.control_network import UPSAMPLER_FOLDER
from pipelines.defaults import Defaults
from pipelines.directory import part_class, read_config
from pipelines.models.linears import attention_linears, mlp_linears, query_key_norms
from pipelines.models.ltx.spec import LTXSpec, vae_scales
from pipelines.models.spec import CLIP, Config, SeveralOutputsSpec, blank_like, lazy
from pipelines.recipes import Recipe
from pipelines.request import InputPictures, MediaRequest

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

VIDEO = "video"
UPSAMPLER_CLASS = "LTX2LatentUpsamplerModel"
MAX_TOKENS = 1024
"""The pipeline's own limit."""
MAX_KEYFRAMES = 8
"""Each adds the tokens of a frame of latents."""
UNUSED = ("prompt_enhancer", "processor", "duration_head", "diffusion_decoder")
"""Parts of LTX-2.5 that no request needs: a request has a length, and the auto-encoder decodes."""
CONTEXT = "reference_conditions"
"""The pipeline's input for clips that an in-context adapter (IC-LoRA) attends to."""
SOUND_RATE = 25
"""Tokens of sound a second."""
BLOCKS = "transformer_blocks"
TO_WHOLE = tuple(f"{BLOCKS}.*.{name}" for name in ("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn"))
"""Attentions to text and to sound."""
SOUND_TO_CLIP = f"{BLOCKS}.*.video_to_audio_attn"
TO_CLIP = (f"{BLOCKS}.*.attn1", SOUND_TO_CLIP)
ATTENTIONS = (*TO_CLIP, *TO_WHOLE)
SWITCHES = ("spatio_temporal_guidance_blocks", "isolate_modalities")
"""Inputs in which passes of guidance differ, beside the prompt."""
POSITIONS = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")

LINEARS = (
    *attention_linears(*ATTENTIONS),
    *query_key_norms(*ATTENTIONS),
    *mlp_linears(f"{BLOCKS}.*.ff", f"{BLOCKS}.*.audio_ff"),
)
GATED = {
    "gated_attn": ("attn1", "attn2", "audio_to_video_attn"),
    "audio_gated_attn": ("audio_attn1", "audio_attn2", "video_to_audio_attn"),
}
"""Attentions that may have a gate for each head, by the setting for the stream of their queries."""


def gates(config: Config) -> tuple[ColumnLinear, ...]:
    """Return the linears of the heads' gates, which some models have (LTX-2.3)."""
    named = [name for setting, names in GATED.items() if config.get(setting) for name in names]
    return tuple(ColumnLinear(pattern=f"{BLOCKS}.*.{name}.to_gate_logits") for name in named)


DISTILLED = Recipe(
    sigmas=(1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875), flow_shift=1.0, true_cfg_scale=1.0
)
REFINED = Recipe(second_stage_sigmas=(0.909375, 0.725, 0.421875))
RECIPES: Mapping[str, Recipe] = {"distilled-8": DISTILLED}
"""For ltx-2-19b-distilled-lora-384.safetensors of Lightricks/LTX-2: the sigmas of the distilled checkpoint are in
``diffusers.pipelines.ltx2.utils`` (DISTILLED_SIGMA_VALUES), for a schedule without shift and stretch; one stage."""
STAGED_RECIPES: Mapping[str, Recipe] = {"two-stages": REFINED, "two-stages-distilled": REFINED.over(DISTILLED)}
"""With STAGE_2_DISTILLED_SIGMA_VALUES in a second pass: the first one for the model, with that adapter in the second
pass alone, the other one for a distilled checkpoint."""


def stage_scale(path: Path) -> float:
    """Return the factor of the sides between two passes; 0 for a folder without a latent upsampler.

    ValueError for an upsampler that makes other clips than larger ones of the same length.
    """
    file = path / UPSAMPLER_FOLDER / "config.json"
    if not file.is_file():
        return 0.0
    config = json.loads(file.read_text())
    if (kind := config.get("_class_name")) != UPSAMPLER_CLASS:
        raise ValueError(f"the {UPSAMPLER_FOLDER} of {path} is a {kind}; it must be a {UPSAMPLER_CLASS}")
    scale: float = config.get("rational_spatial_scale", 2.0) if config.get("use_rational_resampler", True) else 2.0
    if config.get("temporal_upsample") or not config.get("spatial_upsample", True) or scale <= 1:
        raise ValueError(
            f"the {UPSAMPLER_FOLDER} of {path} does not enlarge the sides alone (temporal_upsample, spatial_upsample, "
            f"rational_spatial_scale in its config.json): take a spatial upsampler, or remove the folder"
        )
    return scale


def _context(frames: Sequence[Image]) -> list[Any]:
    """Return the frames of a clip as the pipeline's input."""
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

    return [LTX2ReferenceCondition(frames=list(frames))]


class LTX2Spec(SeveralOutputsSpec, LTXSpec):
    family = "ltx2"
    patch_blocks = lazy("pipelines.models.ltx2.patches:patch_blocks")
    extend_blocks = lazy("pipelines.models.ltx2.patches:decode_by_vae")
    replace_processors = lazy("pipelines.models.ltx2.patches:replace_processors")
    hoisted = lazy("pipelines.models.ltx2.text:hoisted_text")
    """Keys and values of the text, for clip and sound."""
    hoisted_inputs = ("encoder_hidden_states", "audio_encoder_hidden_states")
    latent_upsampler = lazy("pipelines.models.ltx2.upsampler:LatentUpsampler")
    latent_upsampler_bytes = lazy("pipelines.models.ltx2.upsampler:weight_bytes")
    local_attention = TO_WHOLE
    counts_heads = True
    block_modules = ("rope", "audio_rope")

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Norms and positions take the features of all heads."""
        by_head = config["rope_type"] == "split"
        token_dim = 2 if by_head else 1
        return ShardPlan(
            streams=(VIDEO,),
            blocks=(BLOCKS,),
            shards=(
                TokenShard(module="", where="input", key="hidden_states", dim=1, stream=VIDEO),
                TokenShard(module="", where="input", key="timestep", dim=1, stream=VIDEO),
                *(
                    TokenShard(module=name, where="output", key=key, dim=token_dim, stream=VIDEO)
                    for name in ("rope", "cross_attn_rope")
                    for key in (0, 1)
                ),
            ),
            gathers=(TokenGather(module="proj_out", dim=1, stream=VIDEO),),
            linears=(*LINEARS, *gates(config)),
            carried=("hidden_states", "audio_hidden_states"),
            tables=tuple(FeatureTable(pattern=name, dim=1 if by_head else 2) for name in POSITIONS),
            whole_queries=(SOUND_TO_CLIP,),
            free=SWITCHES,
        )

    def hoisted_numbers(self, config: Config) -> int:
        changes = config.get("cross_attn_mod") or config.get("audio_cross_attn_mod")  # with the timestep
        sound = config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
        features = math.prod(self.heads(config)) + sound
        return 0 if changes else 2 * int(config["num_layers"]) * features * MAX_TOKENS

    def unused_parts(self, path: Path) -> tuple[str, ...]:
        return tuple(part for part in UNUSED if part_class(path, part) is not None)

    def outputs(self, module: nn.Module, call: Mapping[str, Any]) -> tuple[Tensor, ...]:
        from pipelines.models.ltx2.text import forward

        return forward(module, call)

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        """Return the connectors' output for each stream; a transformer with its own projections takes more features."""
        import torch

        own = config["caption_channels"] if config["use_prompt_embeddings"] else None
        video, sound = own or config["cross_attention_dim"], own or config["audio_cross_attention_dim"]
        return {
            "connector_prompt_embeds": torch.zeros(1, num_tokens, video),
            "connector_audio_prompt_embeds": torch.zeros(1, num_tokens, sound),
            "connector_attention_mask": torch.ones(1, num_tokens, dtype=torch.int64),
        }

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        clip, sound = (call[name] for name in ("hidden_states", "audio_hidden_states"))
        channels = (config["out_channels"], config["audio_out_channels"])
        return blank_like(clip, (*clip.shape[:2], channels[0])), blank_like(sound, (*sound.shape[:2], channels[1]))

    def place_pictures(self, path: Path, request: MediaRequest, pictures: InputPictures) -> Mapping[str, Any]:
        """Return conditions at places in the clip; one picture that begins it is image-to-video's.

        An input clip is the context of an in-context adapter, beside conditions at any place.
        """
        places = self.defaults(path).keyframes(request) if pictures.pictures else ()
        context = {} if pictures.video is None else {CONTEXT: _context(pictures.video.frames())}
        if not places or (places == (0,) and not context):
            return context
        from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

        pairs = zip(pictures.pictures, places, strict=True)
        conditions = [LTX2VideoCondition(frames=one.on_white(), index=place) for one, place in pairs]
        return {**context, "conditions": conditions}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        blank, places = super().blank_pictures(path, request), self.defaults(path).keyframes(request)
        if places in ((), (0,)) and not request.num_video_frames:
            return blank
        number = len(places)
        return {
            "condition_latents": [blank["image_latents"]] * number,
            "condition_strengths": [1.0] * number,
            "condition_indices": list(places),
            "condition_pixel_frames": [1] * number,
        }

    def blank_video(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return the tokens that an in-context adapter attends to, beside those of the result, and no pictures."""
        import torch

        spatial, temporal = vae_scales(path)
        num_frames = 1 + (request.num_video_frames - 1) // temporal
        num_tokens = num_frames * (request.height // spatial) * (request.width // spatial)
        pictures = ("condition_latents", "condition_strengths", "condition_indices", "condition_pixel_frames")
        return {
            **{name: [] for name in pictures},
            "reference_latents": torch.zeros(1, num_tokens, read_config(path, "vae")["latent_channels"]),
            "reference_coords": torch.zeros(1, 3, num_tokens, 2),
            "reference_token_counts": [num_tokens],
        }

    def estimate_final(self, loop_state: Any, sigma: float) -> Mapping[str, Tensor] | None:
        """Return the finished latents that guidance mixes here; pictures have no noise."""
        clip = getattr(loop_state, "noise_pred_video", None)
        if clip is None:
            return None
        mask, latents = getattr(loop_state, "conditioning_mask", None), loop_state.latents
        clip = clip if clip.shape == latents.shape else clip.flatten(2).mT
        if mask is not None and mask.ndim < latents.ndim:  # that of conditions has the dim of features
            mask = mask[..., None]
        estimate = clip if mask is None else latents.where(mask > 0, clip.to(latents.dtype))
        return {"latents": estimate, "audio_latents": loop_state.noise_pred_audio}

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return a rate at which one frame lasts as long as a token of sound: the model fails without any.

        Ranks, which get no clip, choose their blocks by a context without frames.
        """
        inputs: dict[str, Any] = {"frame_rate": min(request.fps, SOUND_RATE)} if request.num_frames == 1 else {}
        return {**inputs, CONTEXT: _context(())} if request.num_video_frames else inputs

    def first_frame(self, config: Config, latents: Mapping[str, Any]) -> Mapping[str, Any]:
        frames = 1 + (latents["num_frames"] - 1) // config["vae_scale_factors"][0]
        num_tokens = latents.get("base_token_count", latents["latents"].shape[1])  # pictures at frames follow these
        return {"latents": latents["latents"][:, : num_tokens // frames], "num_frames": 1}

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return the distilled adapter's, and those of two passes for a folder with a latent upsampler."""
        return {**RECIPES, **(STAGED_RECIPES if stage_scale(path) else {})}

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' pipeline, as on the model card (Lightricks/LTX-2).

        The auto-encoder mirrors latents at their edges, which needs two in a row.
        """
        if part_class(path, "vae") is None:
            raise ValueError(
                f"{path} has no vae, and its diffusion_decoder is not served: it needs NATTEN's kernels at real sizes; "
                "take a folder with the vae as well"
            )
        spatial, temporal = vae_scales(path)
        return replace(
            CLIP,
            width=768,
            height=512,
            num_inference_steps=30,
            true_cfg_scale=3.0,
            size_multiple=spatial,
            min_side=2 * spatial,
            frame_multiple=temporal,
            max_pixels=1920 * 1088,
            max_frames=257,
            max_pictures=MAX_KEYFRAMES,
            takes_frame_indices=True,
            max_video_frames=257,
            video_needs_lora=True,
            takes_both=True,
            keeps_length=True,
            make_sound=True,
            stage_scale=stage_scale(path),
            max_tokens=MAX_TOKENS,
        )


SPEC = LTX2Spec()
