"""HunyuanVideo 1.5: clip and text attend to one another in every block; the text's padding is masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.models.linears import joint_attention_linears, mlp_linears
from pipelines.models.makers_layers import DOUBLE_BLOCKS, LAST_LAYERS, MakersLayers, embedder
from pipelines.models.padding import shorten_prompts
from pipelines.models.spec import CLIP, Config, ModelSpec, fewer_channels, first_latent_frame, lazy, num_patches
from pipelines.request import MediaRequest
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

VIDEO, TEXT = "video", "text"
PROMPT_TOKENS = 1000
GLYPH_TOKENS = 256
PICTURE_TOKENS = 729
"""The pipeline's token limits: prompt, words to write in the clip, and SigLIP's 27 x 27 patches of a picture."""
SHORT_PROMPT = 256
"""Length of a step's text if the prompt's own tokens fit, and it names no words to write."""
SHORT_TEXT = {("prompt_embeds", "prompt_embeds_mask"): SHORT_PROMPT, ("prompt_embeds_2", "prompt_embeds_mask_2"): 0}

SHARDS = (
    TokenShard(module="rope", where="output", key=0, dim=0, stream=VIDEO),
    TokenShard(module="rope", where="output", key=1, dim=0, stream=VIDEO),
    TokenShard(module="transformer_blocks.0", where="input", key="hidden_states", dim=1, stream=VIDEO),
    TokenShard(module="transformer_blocks.0", where="input", key="encoder_hidden_states", dim=1, stream=TEXT),
    TokenShard(module="transformer_blocks.*", where="input", key="attention_mask", dim=1, stream=TEXT),
)
BLOCK = "transformer_blocks.*"
LINEARS = (*joint_attention_linears(f"{BLOCK}.attn"), *mlp_linears(f"{BLOCK}.ff", f"{BLOCK}.ff_context"))

EMBEDDER = (r"(?:mlp\.0|linear_1|in_layer)", r"(?:mlp\.2|linear_2|out_layer)")
"""Layers of an embedder in either's names."""
REFINER = r"txt_in\.individual_token_refiner\.blocks\.(\d+)\."
OWN_REFINER = r"context_embedder.token_refiner.refiner_blocks.\1."
MAKERS_LAYERS: MakersLayers = {
    **DOUBLE_BLOCKS,
    rf"{REFINER}self_attn[._]qkv": tuple(f"{OWN_REFINER}attn.to_{one}" for one in "qkv"),
    rf"{REFINER}self_attn[._]proj": (f"{OWN_REFINER}attn.to_out.0",),
    rf"{REFINER}mlp\.(?:fc1|0)": (f"{OWN_REFINER}ff.net.0.proj",),
    rf"{REFINER}mlp\.(?:fc2|2)": (f"{OWN_REFINER}ff.net.2",),
    rf"{REFINER}adaLN_modulation\.1": (f"{OWN_REFINER}norm_out.linear",),
    rf"{REFINER}(norm[12])": (rf"{OWN_REFINER}\2",),
    r"txt_in\.input_embedder": ("context_embedder.proj_in",),
    **embedder(r"txt_in\.t_embedder", "timestep_embedder", EMBEDDER, "context_embedder.time_text_embed."),
    **embedder(r"txt_in\.c_embedder", "text_embedder", EMBEDDER, "context_embedder.time_text_embed."),
    **embedder("time_in", "timestep_embedder", EMBEDDER, "time_embed."),
    **embedder("time_r_in", "timestep_embedder_r", EMBEDDER, "time_embed."),
    r"img_in\.proj": ("x_embedder.proj",),
    r"byt5_in\.layernorm": ("context_embedder_2.norm",),
    r"byt5_in\.fc([123])": (r"context_embedder_2.linear_\1",),
    **{
        rf"vision_in\.proj\.{number}": (f"image_embedder.{own}",)
        for number, own in ((0, "norm_in"), (1, "linear_1"), (3, "linear_2"), (4, "norm_out"))
    },
    "cond_type_embedding": ("cond_type_embed",),
    **LAST_LAYERS,
}
"""Tencent's names (musubi-tuner) and ComfyUI's; diffusers has them in a conversion script only."""


def begins_with_picture(config: Config) -> bool:
    return bool(config["task_type"] == "i2v")


LOW = 640
"""``target_size`` of the models for 480p."""


class HunyuanVideoSpec(ModelSpec):
    family = "hunyuan_video"
    latent_channels = ("out_channels",)
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    fits_pictures = True
    needs_negative = True
    makers_layers = MAKERS_LAYERS
    decodes_frames_apart = True
    short_prompts = (SHORT_PROMPT,)
    eager_only = "masks keys (text of several lengths)"
    patch_blocks = lazy("pipelines.models.hunyuan_video.patches:patch_blocks")
    forward = lazy("pipelines.models.hunyuan_video.attention:forward")
    set_kernel = lazy("pipelines.models.hunyuan_video.attention:set_kernel")
    blank_prediction = fewer_channels
    first_frame = first_latent_frame

    def shard_plan(self, config: Config) -> ShardPlan:
        return ShardPlan(
            streams=(VIDEO, TEXT),
            blocks=("transformer_blocks",),
            shards=SHARDS,
            gathers=(TokenGather(module="proj_out", dim=1, stream=VIDEO),),
            linears=LINEARS,
            carried=("hidden_states", "encoder_hidden_states"),
        )

    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        patch = (config["patch_size_t"], config["patch_size"], config["patch_size"])
        text = ("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds")
        return {
            VIDEO: num_patches(arguments["hidden_states"].shape[2:], patch),
            TEXT: sum(int(arguments[name].shape[1]) for name in text if name in arguments),
        }

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        own = num_tokens or PROMPT_TOKENS
        return {
            "prompt_embeds": torch.zeros(1, PROMPT_TOKENS, config["text_embed_dim"]),
            "prompt_embeds_mask": (torch.arange(PROMPT_TOKENS)[None] < own).float(),
            "prompt_embeds_2": torch.zeros(1, GLYPH_TOKENS, config["text_embed_2_dim"]),
            "prompt_embeds_mask_2": torch.full((1, GLYPH_TOKENS), float(own > SHORT_PROMPT)),
        }

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Tensor]:
        import torch

        vae, config = read_config(path, "vae"), read_config(path, "transformer")
        sides = (side // vae["spatial_compression_ratio"] for side in (request.height, request.width))
        return {
            "image_latents": torch.zeros(1, vae["latent_channels"], 1, *sides),
            "image_embeds": torch.zeros(1, PICTURE_TOKENS, config["image_embed_dim"]),
        }

    def pad_conditioning(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``values`` with less padding: text has no positions."""
        return shorten_prompts(values, SHORT_TEXT)

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the call without the zeros that stand for a picture in a text-only model: nothing attends to them."""
        if begins_with_picture(config):
            return call
        return {name: value for name, value in call.items() if name != "image_embeds"}

    def complete_pipeline(self, pipeline: Any) -> None:
        from pipelines.models.hunyuan_video.patches import frame_by_frame

        if getattr(pipeline, "vae", None) is not None:
            frame_by_frame(pipeline.vae)

    def defaults(self, path: Path) -> Defaults:
        """Return the model card's (tencent/HunyuanVideo-1.5): 121 frames at 24 a second, 50 steps, a scale of 6."""
        vae, config = read_config(path, "vae"), read_config(path, "transformer")
        width, height = (1280, 720) if config["target_size"] > LOW else (848, 480)
        num_pictures = int(begins_with_picture(config))
        return replace(
            CLIP,
            width=width,
            height=height,
            true_cfg_scale=6.0,
            size_multiple=vae["spatial_compression_ratio"] * config["patch_size"],
            frame_multiple=vae["temporal_compression_ratio"],
            min_pictures=num_pictures,
            max_pictures=num_pictures,
        )


SPEC = HunyuanVideoSpec()
