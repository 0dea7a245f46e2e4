"""Wan 2.1 and 2.2 (and models of the same layout).

The text stays whole on every rank (cross-attention needs all of it), as do the embedders and the modulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, FullWidthNorm, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index
from pipelines.latent_sizes import latent_sizes, space_time_scales
from pipelines.models.linears import attention_linears, mlp_linears, query_key_norms
from pipelines.models.spec import (
    CLIP,
    Config,
    ModelSpec,
    check_channels,
    fewer_channels,
    first_latent_frame,
    lazy,
    num_patches,
)
from pipelines.recipes import Recipe
from pipelines.request import MediaRequest
from pipelines.solver import SIGMAS, TIMESTEPS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

VIDEO = "video"
ATTENTIONS = ("blocks.*.attn1", "blocks.*.attn2")
SIZE_MULTIPLE = 16
"""The reference pipeline refuses other sizes, whatever the auto-encoder."""
MAX_TOKENS = 512
SMALL_LAYERS = 30

SHARDS = (
    TokenShard(module="rope", where="output", key=0, dim=1, stream=VIDEO),
    TokenShard(module="rope", where="output", key=1, dim=1, stream=VIDEO),
    TokenShard(module="blocks.0", where="input", key="hidden_states", dim=1, stream=VIDEO),
)
TIMESTEP_SHARD = TokenShard(module="", where="input", key="timestep", dim=1, stream=VIDEO)

LINEARS = (*attention_linears(*ATTENTIONS), *query_key_norms(*ATTENTIONS), *mlp_linears("blocks.*.ffn"))
PICTURE_LINEARS: tuple[ColumnLinear | FullWidthNorm, ...] = (
    ColumnLinear(pattern="blocks.*.attn2.add_k_proj"),
    ColumnLinear(pattern="blocks.*.attn2.add_v_proj"),
    FullWidthNorm(pattern="blocks.*.attn2.norm_added_k"),
)
EMBEDS = "image_embeds"
"""CLIP's embeddings of pictures, which are made in float32."""
PICTURE_TOKENS = 257
"""Tokens of a picture by CLIP: 16 x 16 patches and one token for all (arXiv:2103.00020, ViT-H/14 at 224)."""


def expands_timesteps(config: Config) -> bool:
    """Return whether the transformer takes one timestep a token (Wan 2.2 TI2V)."""
    return bool(config.get("pipeline", {}).get("expand_timesteps"))


def attends_to_pictures(config: Config) -> bool:
    """Return whether cross-attention also has keys of pictures (Wan 2.1 image to video)."""
    return config.get("added_kv_proj_dim") is not None


def num_picture_tokens(config: Config) -> int:
    """Return the tokens of pictures in cross-attention: of two, if they have positions (first and last frame)."""
    return (config.get("pos_embed_seq_len") or PICTURE_TOKENS) if attends_to_pictures(config) else 0


LARGE = replace(CLIP, num_frames=81, fps=16, max_frames=81, max_tokens=MAX_TOKENS)
"""Wan 2.1 14B; the others differ in a few values (from their model cards on the hub)."""

SMALL_SIZE: dict[str, Any] = {"width": 832, "height": 480}
ONE_PICTURE: dict[str, Any] = {"min_pictures": 1, "max_pictures": 1}
PICTURE_PIPELINES = ("WanImageToVideoPipeline", "WanImage2VideoModularPipeline", "Wan22Image2VideoModularPipeline")

SMALL = replace(LARGE, **SMALL_SIZE)
TWO_EXPERTS = replace(LARGE, num_inference_steps=40, true_cfg_scale=4.0)
"""The card's guidance scale for high noise (3.0 for low noise): a request has one scale for both."""
PER_TOKEN_TIME = replace(LARGE, height=704, num_frames=121, fps=24, max_frames=121, max_pictures=1)
"""One model for words and for words with a first picture."""


def _model_defaults(path: Path) -> Defaults:
    """Return the defaults of the published model that the folder resembles.

    Wan 2.2 A14B has two transformers, TI2V 5B a timestep a token; Wan 2.1 has 30 or 40 layers. ValueError for a
    transformer that takes more than the latents of a clip.
    """
    config, index = read_config(path, "transformer"), read_index(path)
    needs_pictures, has_first_frame = index["_class_name"] in PICTURE_PIPELINES, begins_with_first_frame(path)
    if needs_pictures and not has_first_frame:
        return _picture_defaults(path)
    check_channels(path, "transformer", given=config.get("out_channels", config.get("in_channels")))
    if has_first_frame:
        return replace(PER_TOKEN_TIME, min_pictures=int(needs_pictures))
    if index.get("boundary_ratio") is not None:
        return TWO_EXPERTS
    return SMALL if config["num_layers"] <= SMALL_LAYERS else LARGE


def begins_with_first_frame(path: Path) -> bool:
    """Return whether a picture is the clip's first latent frame, with tokens at time 0 (Wan 2.2 TI2V).

    ValueError for two experts with a timestep a token.
    """
    index = read_index(path)
    if not index.get("expand_timesteps"):
        return False
    if index.get("boundary_ratio") is not None:
        raise ValueError(
            f"{path} has expand_timesteps and boundary_ratio in its index: a timestep a token and two transformers; "
            "a model has one of the two, so take out the other"
        )
    return True


def _picture_defaults(path: Path) -> Defaults:
    """Return picture models' defaults: Wan 2.2 has no picture keys, first-and-last-frame Wan 2.1 two positions."""
    config = read_config(path, "transformer")
    if not attends_to_pictures(config):
        return replace(TWO_EXPERTS, **SMALL_SIZE, true_cfg_scale=3.5, **ONE_PICTURE)
    if config.get("pos_embed_seq_len") is not None:
        return replace(LARGE, true_cfg_scale=5.5, min_pictures=2, max_pictures=2)
    return replace(LARGE, **SMALL_SIZE, **ONE_PICTURE)


FOUR_STEPS = Recipe(scheduler="euler", sigmas=(1.0, 0.75, 0.5, 0.25), flow_shift=5.0, true_cfg_scale=1.0)
"""Shift 5, no guidance, and the timesteps 1000, 750, 500 and 250 before the shift.

Wan 2.2: the configurations of Wan2.2-Lightning (wan/configs/wan_t2v_A14B.py and wan_i2v_A14B.py). The files are
high_noise_model.safetensors and low_noise_model.safetensors in a folder of lightx2v/Wan2.2-Lightning. Wan 2.1: LightX2V
(configs/distill/wan21/wan_t2v_distill_lora_4step_cfg.json). The file, in lightx2v/Wan2.1-Distill-Loras, is
wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors. LightX2V's solver draws new noise between these steps; Euler's
keeps the old noise.
"""


class WanSpec(ModelSpec):
    family = "wan"
    latent_channels = ("out_channels",)
    schedulers = ("euler", "unipc", "dpm++")
    schedules = (SIGMAS, TIMESTEPS)
    fits_pictures = True
    float32_parts = ("vae", "image_encoder")
    needs_negative = True
    decodes_frames_apart = True
    forward = lazy("pipelines.models.wan.attention:forward")
    set_kernel = lazy("pipelines.models.wan.attention:set_kernel")
    blank_prediction = fewer_channels
    first_frame = first_latent_frame
    patch_blocks = lazy("pipelines.models.wan.patches:patch_blocks")
    hoisted = lazy("pipelines.models.wan.attention:hoisted_text")
    """The text's keys and values."""

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Timesteps are cut like the tokens if each token has its own."""
        return ShardPlan(
            streams=(VIDEO,),
            blocks=("blocks",),
            shards=(*SHARDS, TIMESTEP_SHARD) if expands_timesteps(config) else SHARDS,
            gathers=(TokenGather(module="proj_out", dim=1, stream=VIDEO),),
            linears=(*LINEARS, *PICTURE_LINEARS) if attends_to_pictures(config) else LINEARS,
            carried=("hidden_states",),
        )

    def hoisted_numbers(self, config: Config) -> int:
        heads, dim = self.heads(config)
        num_blocks = int(config["num_layers"]) + len(config.get("vace_layers") or ())
        return 2 * num_blocks * heads * dim * (MAX_TOKENS + num_picture_tokens(config))

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {VIDEO: num_patches(arguments["hidden_states"].shape[2:], config["patch_size"])}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        tokens = MAX_TOKENS if attends_to_pictures(config) else num_tokens
        return {"prompt_embeds": torch.zeros(1, tokens, config["text_dim"])}

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Tensor]:
        """Return encoded frames with a mask of the given ones, and CLIP's embeddings of pictures.

        Return only the first frame if its tokens have a timestep of their own.
        """
        import torch

        config, sizes = read_config(path, "transformer"), latent_sizes(request, space_time_scales(path))
        if begins_with_first_frame(path):
            return {"first_frame_latents": torch.zeros(1, config["in_channels"], 1, *sizes[1:])}
        channels = config["in_channels"] - config["out_channels"]
        values = {"image_condition_latents": torch.zeros(1, channels, *sizes)}
        if attends_to_pictures(config):
            values[EMBEDS] = torch.zeros(request.num_pictures, PICTURE_TOKENS, config["image_dim"])
        return values

    def pad_conditioning(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return CLIP's embeddings of pictures in the prompt's dtype.

        Blocks would cast them at each step, and the keys made of them would be made anew.
        """
        pictures = values.get(EMBEDS)
        return values if pictures is None else {**values, EMBEDS: pictures.to(values["prompt_embeds"].dtype)}

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the call with the exact timestep: one for all tokens, except with a first picture.

        Diffusers' blocks round it to the prompt's dtype. A model that takes one a token gets a row of one: embedded
        for each token, equal ones would cost a large product in float32 and modulation of every token.
        """
        if call["timestep"].ndim == 2:
            return call
        timestep_B = step["t"].float().expand(call["timestep"].shape[0])
        if not expands_timesteps(config):
            return {**call, "timestep": timestep_B}
        return {**call, "timestep": timestep_B[:, None]}

    def extend_blocks(self, blocks: Any, path: Path) -> None:
        if begins_with_first_frame(path):
            lazy("pipelines.models.wan.patches:extend_blocks")(blocks)

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return those of the models with 14B parameters in a transformer; of Wan 2.1 for text to clip alone."""
        index, config = read_index(path), read_config(path, "transformer")
        if config["num_layers"] <= SMALL_LAYERS or index.get("expand_timesteps"):
            return {}
        if index.get("boundary_ratio") is not None:
            return {"lightning-4": FOUR_STEPS}
        return {"lightx2v-4": FOUR_STEPS} if config["in_channels"] == config["out_channels"] else {}

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of the published model that the folder resembles, with its own grid."""
        (spatial, temporal), patch = space_time_scales(path), read_config(path, "transformer")["patch_size"]
        multiple = self.size_multiple(spatial, patch)
        return replace(_model_defaults(path), size_multiple=multiple, frame_multiple=temporal)

    @staticmethod
    def size_multiple(spatial: int, patch: Sequence[int]) -> int:
        """Return the multiple of sides, with latent values of ``spatial`` pixels, in patches."""
        return math.lcm(SIZE_MULTIPLE, spatial * patch[1], spatial * patch[2])


SPEC = WanSpec()
