"""A transformer class without a family here: it runs as its pipeline calls it.

A class with diffusers' ``_cp_plan`` is divided by it (see ``converted``). Any other runs whole, on one rank a gang,
with its own attention. Sizes, steps and guidance come from the pipeline's blocks, or a folder's ``troupe.json``. The
shapes of its conditioning are unknown: the first request warms a gang up, without a self-check.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan
from pipelines.control_network import PART, control_defaults
from pipelines.defaults import Defaults
from pipelines.directory import CLASSIC, DENOISERS, MODULAR, U_NET, open_modular, part_class, read_config, read_index
from pipelines.models.generic.outline import empty, repeated_blocks
from pipelines.models.spec import CONTROL, Config, ModelSpec, blank_like, check_channels, lazy, scale_residual
from pipelines.recipes import Recipe
from pipelines.solver import NOISE, SIGMAS, TIMESTEPS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.attention import Kernel
    from engines.core.model import Arguments

TOKENS = "tokens"
"""The one stream of an undivided class."""
LATENTS = ("hidden_states", "sample", "latents", "x")
"""Argument names of the latents in transformers."""
HEADS = ("num_attention_heads", "num_heads", "n_heads", "heads")
HEAD_DIMS = ("attention_head_dim", "head_dim", "dim_head")
WIDTHS = ("hidden_size", "inner_dim", "dim")
UNKNOWN_HEADS = (1, 64)
"""Number and dim of heads if the configuration has none: undivided attention is only tested with them."""
SCALES = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
TEMPORAL_SCALES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
PICTURE, CLIP = (1024, 1024), (832, 480)
NUM_FRAMES, FPS, NUM_STEPS = 81, 24, 50
STEPS = "num_inference_steps"
LONGEST_CLIP = 257
LATENT_CHANNELS = 4
"""Latent channels of diffusers' auto-encoder for pictures, unless configured."""


DISTILLED: Mapping[str, Any] = {"scheduler": "euler_trailing", "true_cfg_scale": 1.0}
RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "StableDiffusionXLPipeline": {
        "lightning-2": Recipe(num_inference_steps=2, **DISTILLED),
        "lightning-4": Recipe(num_inference_steps=4, **DISTILLED),
        "lightning-8": Recipe(num_inference_steps=8, **DISTILLED),
        "lcm-4": Recipe(num_inference_steps=4, scheduler="lcm", true_cfg_scale=1.0),
    }
}
"""By pipeline, from the cards of ByteDance/SDXL-Lightning (sdxl_lightning_4step_lora.safetensors and the like: Euler,
trailing timesteps, no guidance) and latent-consistency/lcm-lora-sdxl (LCM, 2 to 8 steps, no guidance)."""


class Prediction(tuple[Any, ...]):
    """The output of diffusers' transformers, with or without ``return_dict``."""

    @property
    def sample(self) -> Any:
        return self[0]


RESIDUALS, MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"
"""Arguments of a U-Net for what a control network adds to its features."""


class GenericSpec(ModelSpec):
    """A class that runs whole, on one rank a gang, with its own attention."""

    has_known_conditioning = False
    patch_blocks = lazy("pipelines.blocks.tree:move_text_blocks")

    def __init__(self, module_class: Any) -> None:
        self.module_class, self.family = module_class, str(module_class.__name__)

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return a plan that cuts nothing; its blocks, which compile, are the class's repeated ones."""
        blocks = repeated_blocks(empty(self.module_class, config))
        return ShardPlan(streams=(TOKENS,), blocks=blocks, shards=(), gathers=(), linears=())

    def stream_lengths(self, config: Config, arguments: Arguments) -> Mapping[str, int]:
        return {TOKENS: 1}

    def heads(self, config: Config) -> tuple[int, int]:
        number = next((config[name] for name in HEADS if isinstance(config.get(name), int)), None)
        dim = next((config[name] for name in HEAD_DIMS if isinstance(config.get(name), int)), None)
        width = next((config[name] for name in WIDTHS if isinstance(config.get(name), int)), None)
        if number is None:
            return UNKNOWN_HEADS
        if dim is None and width is not None:
            dim = width // number
        return (number, dim) if dim is not None else UNKNOWN_HEADS

    def set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        """Keep the class's own attention: one rank has nothing to exchange."""

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> Prediction:
        """Return zeros in the form of the latents, with fewer channels if the output has fewer."""
        name = next(name for name in LATENTS if name in call)
        if isinstance(call[name], list | tuple):
            return Prediction(([blank_like(x) for x in call[name]],))
        latents, num_channels = call[name], config.get("out_channels")
        shape = list(latents.shape)
        if latents.ndim >= 4 and isinstance(num_channels, int):
            shape[1] = min(shape[1], num_channels)
        return Prediction((blank_like(latents, shape),))

    def forward(self, module: nn.Module, call: Mapping[str, Any]) -> Tensor:
        """Return the first tensor of the output; most transformers have only one."""
        output: Any = module(**call, return_dict=False)[0]
        if isinstance(output, list | tuple):
            (output,) = output
        prediction: Tensor = output
        return prediction

    def to_output(self, config: Config, call: Mapping[str, Any], prediction: Tensor) -> Prediction:
        name = next(name for name in LATENTS if name in call or f"{name}.0" in call)
        return Prediction(([prediction],) if isinstance(call[name], list | tuple) else (prediction,))

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return those of the folder's pipeline."""
        return RECIPES.get(str(read_index(path).get("_class_name")), {})

    def defaults(self, path: Path) -> Defaults:
        """Return steps and guidance of diffusers' classic pipeline, else of its blocks, else common values."""
        pipeline, call = open_modular(path), call_defaults(path)
        inputs = {spec.name: spec.default for spec in pipeline.blocks.inputs if spec.name is not None}
        outputs = {spec.name for spec in pipeline.blocks.outputs}
        is_video = "videos" in outputs
        width, height = _size(pipeline, inputs, CLIP if is_video else PICTURE)
        guider = next((part for name, part in vars(pipeline).items() if name == "guider"), None)
        scales = (getattr(pipeline, name, None) for name in TEMPORAL_SCALES)
        temporal = int(_first(*scales, 4)) if is_video else 1
        num_frames = _first(inputs.get("num_frames"), getattr(pipeline, "default_num_frames", None), NUM_FRAMES)
        num_frames = 1 + (num_frames - 1) // temporal * temporal
        return Defaults(
            kind="video" if is_video else "image",
            width=width,
            height=height,
            num_frames=num_frames if is_video else 1,
            fps=int(_first(inputs.get("fps"), inputs.get("frame_rate"), FPS)) if is_video else 0,
            num_inference_steps=int(_first(call.get(STEPS), inputs.get(STEPS), NUM_STEPS)),
            guidance_scale=float(_first(inputs.get("guidance_scale"), 0.0)),
            **_guidance(guider, call.get("true_cfg_scale" if "guidance_scale" in inputs else "guidance_scale")),
            size_multiple=_size_multiple(pipeline, path),
            frame_multiple=temporal,
            max_pixels=max(2048 * 2048 if not is_video else 1280 * 720, width * height),
            max_frames=max(LONGEST_CLIP, num_frames) if is_video else 1,
            max_steps=100,
            max_pictures=int("image" in inputs),
            **_masks(path),
            **self.controls(path),
            takes_mask="mask_image" in inputs,
            takes_strength="strength" in inputs,
            strength=float(_first(inputs.get("strength"), 1.0)),
            rounds_steps_down=part_class(path, U_NET) is not None,  # pipelines with transformers round up
            max_tokens=int(_first(inputs.get("max_sequence_length"), 0)),
        )

    def controls(self, path: Path) -> Mapping[str, Any]:
        """Return values for control pictures: none."""
        return {}


class UNetSpec(GenericSpec):
    """A U-Net whose pipeline has modular blocks (Stable Diffusion XL). It may have a control network."""

    control_part = PART
    schedulers, schedules = tuple(NOISE), (SIGMAS, TIMESTEPS)

    def controls(self, path: Path) -> Mapping[str, Any]:
        """Return values for control pictures. ValueError for a network of another class."""
        return control_defaults(path, "ControlNetModel")

    def control_residuals(self, call: Mapping[str, Any]) -> Any:
        """Return the arguments that only the network has, in the form of residuals: a list, and one tensor."""
        import torch

        scale = torch.tensor(float(call["conditioning_scale"]))
        return [call["controlnet_cond"], scale], scale

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the call with the control picture and its weight in place of residuals."""
        kept = {name: value for name, value in call.items() if name not in (RESIDUALS, MIDDLE)}
        if not (residuals := call.get(RESIDUALS)):
            return kept
        return {**kept, CONTROL: dict(zip(("controlnet_cond", "scale"), residuals, strict=True))}

    def forward(self, module: nn.Module, call: Mapping[str, Any]) -> Tensor:
        """Return the noise. The control network, a part of the step, runs first."""
        kept = {name: value for name, value in call.items() if name != CONTROL}
        if (control := call.get(CONTROL)) is None:
            return super().forward(module, kept)
        own = ("sample", "timestep", "encoder_hidden_states", "added_cond_kwargs")
        shared = {name: kept[name] for name in own if name in kept}
        network: Any = module.get_submodule(PART)
        down, middle = network(**shared, controlnet_cond=control["controlnet_cond"], return_dict=False)
        *scaled, last = (scale_residual(x, control["scale"]) for x in (*down, middle))
        return super().forward(module, {**kept, RESIDUALS: tuple(scaled), MIDDLE: last})


def call_defaults(path: Path) -> dict[str, Any]:
    """Return the default arguments of diffusers' classic pipeline; none if it has no such pipeline.

    The blocks' defaults may differ: guidance of Stable Diffusion XL is 7.5 there, and 5 in its pipeline.
    """
    name = str(read_index(path).get("_class_name")).replace(MODULAR, CLASSIC)
    pipeline = getattr(import_module("diffusers"), name, None)
    parameters = [] if pipeline is None else inspect.signature(pipeline.__call__).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _masks(path: Path) -> dict[str, Any]:
    """Return values of a U-Net for masks, which also sees mask and masked picture. ValueError for other channels."""
    if part_class(path, U_NET) is None:
        return {}
    latents = int(read_config(path, "vae").get("latent_channels", LATENT_CHANNELS))
    if read_config(path, U_NET).get("in_channels", latents) == 2 * latents + 1:
        return {"min_pictures": 1, "needs_mask": True}
    check_channels(path, U_NET, latents)
    return {}


def _guidance(guider: Any, scale: float | None) -> dict[str, Any]:
    """Return guidance values; ``scale`` is the pipeline's default (None: the guider's)."""
    from pipelines.blocks.denoiser import counts_from_prompt

    if guider is None or not guider._enabled:
        return {"true_cfg_scale": 1.0}
    offset = float(counts_from_prompt(guider))
    scale = _first(scale, getattr(guider, "guidance_scale", None), 1.0)
    return {"true_cfg_scale": float(scale) + offset, "guidance_offset": offset}


def _size(pipeline: Any, inputs: Mapping[str, Any], usual: tuple[int, int]) -> tuple[int, int]:
    names = zip(("width", "height"), usual, strict=True)
    width, height = (_first(getattr(pipeline, f"default_{name}", None), inputs.get(name), side) for name, side in names)
    return width, height


def _size_multiple(pipeline: Any, path: Path) -> int:
    """Return pixels a token; at least 16, for auto-encoders that name their scale otherwise."""
    scale = max(int(getattr(pipeline, name, 1)) for name in SCALES)
    parts = (part for part in DENOISERS if part_class(path, part) is not None)
    patch = max((_patch(read_config(path, part).get("patch_size", 1)) for part in parts), default=1)
    return math.lcm(16, scale * patch)


def _patch(size: Any) -> int:
    return int(size[-1]) if isinstance(size, list | tuple) else int(size or 1)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
