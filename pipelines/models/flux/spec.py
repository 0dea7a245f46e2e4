"""FLUX.1 (dev, schnell, Kontext and models of the same layout).

The modulation layers, the embedders and the per-head norms stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index
from pipelines.latent_sizes import vae_scale
from pipelines.models.linears import QUERY_KEY_VALUE, Linears, joint_attention_linears, mlp_linears
from pipelines.models.makers_layers import DOUBLE_BLOCKS, LAST_LAYERS, OWN, MakersLayers, embedder, two_streams
from pipelines.models.spec import PICTURE, Config, TextAndImageSpec, check_channels, lazy
from pipelines.recipes import Recipe
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.request import MediaRequest

TEXT, IMAGE = "text", "image"
DUAL, SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
MLP_RATIO = 4
"""Width of the MLP of a block over the width of its attention, fixed in diffusers' class."""
PATCH = 2
MAX_TOKENS, MAX_TOKENS_SCHNELL = 512, 256

SHARDS = (
    TokenShard(module="", where="input", key="hidden_states", dim=1, stream=IMAGE),
    TokenShard(module="", where="input", key="encoder_hidden_states", dim=1, stream=TEXT),
    TokenShard(module="", where="input", key="img_ids", dim=0, stream=IMAGE),
    TokenShard(module="", where="input", key="txt_ids", dim=0, stream=TEXT),
)

DUAL_LINEARS = (*joint_attention_linears(f"{DUAL}.attn"), *mlp_linears(f"{DUAL}.ff", f"{DUAL}.ff_context"))
SINGLE_LINEARS: Linears = (
    *(ColumnLinear(pattern=f"{SINGLE}.attn.{name}") for name in QUERY_KEY_VALUE),
    ColumnLinear(pattern=f"{SINGLE}.proj_mlp"),
    RowLinear(pattern=f"{SINGLE}.proj_out", segments=(1, MLP_RATIO)),
)

SHARD_PLAN = ShardPlan(
    streams=(TEXT, IMAGE),
    blocks=("transformer_blocks", "single_transformer_blocks"),
    shards=SHARDS,
    gathers=(TokenGather(module="proj_out", dim=1, stream=IMAGE),),
    linears=(*DUAL_LINEARS, *SINGLE_LINEARS),
    carried=("encoder_hidden_states", "hidden_states"),
)

MAKERS_SINGLE, OWN_SINGLE = r"single_blocks\.(\d+)\.", r"single_transformer_blocks.\1."
STUDIO_NAMES = (r"attn\.{}_to_qkv", r"attn\.{}_to_out", r"ff_{}\.0", r"ff_{}\.2", r"norm1_{}\.linear")
MAKERS_LAYERS: MakersLayers = {
    **DOUBLE_BLOCKS,
    rf"{MAKERS_SINGLE}linear1": (*(f"{OWN_SINGLE}attn.to_{one}" for one in "qkv"), f"{OWN_SINGLE}proj_mlp"),
    rf"{MAKERS_SINGLE}linear2": (f"{OWN_SINGLE}proj_out",),
    rf"{MAKERS_SINGLE}modulation\.lin": (f"{OWN_SINGLE}norm.linear",),
    rf"{MAKERS_SINGLE}norm\.(q|k)[a-z]+_norm": (rf"{OWN_SINGLE}attn.norm_\2",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **embedder("time_in", "timestep_embedder"),
    **embedder("vector_in", "text_embedder"),
    **embedder("guidance_in", "guidance_embedder"),
    **LAST_LAYERS,
    **two_streams(r"blocks\.(\d+)\.", "a", "b", STUDIO_NAMES),
    rf"{MAKERS_SINGLE}to_qkv_mlp": (*(f"{OWN_SINGLE}attn.to_{one}" for one in "qkv"), f"{OWN_SINGLE}proj_mlp"),
    rf"{MAKERS_SINGLE}norm_(q|k)_a": (rf"{OWN_SINGLE}attn.norm_\2",),
    rf"{MAKERS_SINGLE}(norm\.linear|proj_out)": (rf"{OWN_SINGLE}\2",),
    r"blocks\.(\d+)\.attn\.norm_(q|k)_a": (rf"{OWN}attn.norm_\2",),
    r"blocks\.(\d+)\.attn\.norm_(q|k)_b": (rf"{OWN}attn.norm_added_\2",),
    **embedder(r"time_embedder\.timestep_embedder", "timestep_embedder", ("0", "2")),
    **embedder(r"guidance_embedder\.timestep_embedder", "guidance_embedder", ("0", "2")),
    **embedder("pooled_text_embedder", "text_embedder", ("0", "2")),
    "(x_embedder|context_embedder)": (r"\1",),
    r"final_norm_out\.linear": ("norm_out.linear",),
    "final_proj_out": ("proj_out",),
}
"""The makers' names, then those of DiffSynth-Studio."""

DRAWING = ("FluxPipeline", "FluxModularPipeline")
EDITOR: Mapping[str, Any] = {"guidance_scale": 2.5, "takes_strength": False, "strength": 1.0}
"""Defaults of an editor (guidance scale from FLUX.1-Kontext-dev's card)."""


RECIPES: Mapping[str, Recipe] = {
    "turbo-8": Recipe(num_inference_steps=8, guidance_scale=3.5),
    "hyper-8": Recipe(num_inference_steps=8, guidance_scale=3.5, scale=0.125),
    "hyper-16": Recipe(num_inference_steps=16, guidance_scale=3.5, scale=0.125),
}
"""For FLUX.1-dev, from the cards of alimama-creative/FLUX.1-Turbo-Alpha (scale 1) and of ByteDance/Hyper-SD
(Hyper-FLUX.1-dev-8steps-lora.safetensors and -16steps-, scale about 0.125)."""


class FluxSpec(TextAndImageSpec):
    family = "flux"
    latent_channels = ("out_channels", "in_channels")
    latents_per_channels = PATCH**2
    schedulers = ("euler", "unipc")
    schedules = (SIGMAS,)
    plan = SHARD_PLAN
    makers_layers = MAKERS_LAYERS
    arrange_fast = lazy("pipelines.models.flux.fast:FluxWeights")
    set_kernel = lazy("pipelines.models.flux.attention:set_kernel")
    """Sets an own processor: TensorRT cannot parse the export of diffusers' for variable sizes."""

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        return {
            "prompt_embeds": torch.zeros(1, num_tokens, config["joint_attention_dim"]),
            "pooled_prompt_embeds": torch.zeros(1, config["pooled_projection_dim"]),
        }

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Tensor]:
        """Return an editor's blank picture, in the request's size."""
        import torch

        scale, channels = vae_scale(path), read_config(path, "transformer")["in_channels"] // PATCH**2
        return {"image_latents": torch.zeros(1, channels, request.height // scale, request.width // scale)}

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the call with the timestep rounded before its division, as in ``FluxPipeline``."""
        return {**call, "timestep": step["t"].to(call["hidden_states"].dtype).flatten() / 1000}

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return those of FLUX.1-dev, for the model that draws from words."""
        is_dev = read_config(path, "transformer")["guidance_embeds"]
        return RECIPES if is_dev and read_index(path).get("_class_name") in DRAWING else {}

    def defaults(self, path: Path) -> Defaults:
        """Return FLUX.1-dev's (as in diffusers) if the model takes a guidance scale, else schnell's (its card)."""
        config = read_config(path, "transformer")
        num_channels: int = config.get("out_channels") or config["in_channels"]
        check_channels(path, "transformer", given=num_channels)
        is_dev: bool = config["guidance_embeds"]
        defaults = replace(
            PICTURE,
            num_inference_steps=28 if is_dev else 4,
            guidance_scale=3.5 if is_dev else 0.0,
            size_multiple=vae_scale(path) * PATCH,
            guides_beside_negative=True,
            max_pictures=1,
            takes_strength=True,
            strength=0.6,
            max_tokens=MAX_TOKENS if is_dev else MAX_TOKENS_SCHNELL,
        )
        return replace(defaults, **EDITOR) if "Kontext" in str(read_index(path).get("_class_name")) else defaults


SPEC = FluxSpec()
