"""Qwen-Image and its editors. Pictures to edit are tokens of the image stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.control_network import PART as NETWORK
from pipelines.control_network import control_defaults
from pipelines.defaults import Defaults
from pipelines.directory import read_config, read_index
from pipelines.latent_sizes import clip_vae_scale
from pipelines.models.linears import joint_attention_linears, mlp_linears
from pipelines.models.spec import CONTROL, PICTURE, Config, TextAndImageSpec, lazy
from pipelines.recipes import Recipe
from pipelines.request import MediaRequest
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import ArrangeWeights

TEXT, IMAGE = "text", "image"
BLOCKS = "transformer_blocks"
NETWORK_CLASS, CONTROLLED = "QwenImageControlNetModel", "QwenImageControlNetPipeline"
MAX_TOKENS = 1024
RESIDUALS = "controlnet_block_samples"
"""Argument of the transformer for what a control network adds to the tokens between its blocks."""
WITHOUT_FAST_STEP = (CONTROL, "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope", "guidance_embeds")
"""Settings of transformers that the hand-ordered step does not support."""
NOTHING_TO_AVOID = " "
"""The negative prompt of all cards, with which ``true_cfg_scale`` is 4.0."""
PROMPT_WINDOW = 64
"""Padded prompts have a multiple of this many tokens."""


def linears_of(blocks: str) -> tuple[ColumnLinear | RowLinear, ...]:
    """Return the linears of repeated blocks that a tensor axis splits."""
    return (*joint_attention_linears(f"{blocks}.*.attn"), *mlp_linears(f"{blocks}.*.img_mlp", f"{blocks}.*.txt_mlp"))


SHARD_PLAN = ShardPlan(
    streams=(TEXT, IMAGE),
    blocks=(BLOCKS,),
    shards=(
        TokenShard(module=f"{BLOCKS}.0", where="input", key="hidden_states", dim=1, stream=IMAGE),
        TokenShard(module=f"{BLOCKS}.0", where="input", key="encoder_hidden_states", dim=1, stream=TEXT),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="modulate_index", dim=1, stream=IMAGE),
        TokenShard(module="pos_embed", where="output", key=0, dim=0, stream=IMAGE),
        TokenShard(module="pos_embed", where="output", key=1, dim=0, stream=TEXT),
    ),
    gathers=(TokenGather(module="proj_out", dim=1, stream=IMAGE),),
    linears=linears_of(BLOCKS),
    carried=("encoder_hidden_states", "hidden_states"),
    free=("encoder_hidden_states", "encoder_hidden_states_mask"),
)
CONTROL_PLAN = replace(
    SHARD_PLAN,
    shards=(
        *SHARD_PLAN.shards,
        TokenShard(module=f"{NETWORK}.controlnet_blocks.*", where="input", key="input", dim=1, stream=IMAGE),
    ),
    linears=(*SHARD_PLAN.linears, *linears_of(f"{NETWORK}.{BLOCKS}")),
    carried=(),
)
"""With a control network, which every rank runs over all tokens: guidance gives it another prompt than the transformer.

Its residuals are added between blocks, where stages of a pipeline would lose them.
"""

EDITOR: Mapping[str, Any] = {"min_pictures": 1, "strength_needs_mask": True}
WITHOUT_MASKS: Mapping[str, Any] = {"min_pictures": 1, "takes_mask": False, "takes_strength": False, "strength": 1.0}
LAYERED: Mapping[str, Any] = {
    **WITHOUT_MASKS,
    "width": 640,
    "height": 640,
    "size_multiple": 32,
    "max_pixels": 1024 * 1088,
    "enlarges_pictures": True,
    "describes_pictures": True,
    "num_layers": 4,
    "max_layers": 10,
}
"""The model was made for 640 x 640 or 1024 x 1024 pixels, in any shape with sides that are multiples of 32."""
EDITORS: Mapping[str, Mapping[str, Any]] = {
    "QwenImageEditPipeline": EDITOR,
    "QwenImageEditInpaintPipeline": EDITOR,
    "QwenImageEditPlusPipeline": {**WITHOUT_MASKS, "max_pictures": 3, "num_inference_steps": 40},
    "QwenImageLayeredPipeline": LAYERED,
}
"""Defaults of editors, by pipeline. Three pictures and 40 steps are from Edit-Plus's card."""


LIGHTNING: Mapping[str, Any] = {"true_cfg_scale": 1.0, "flow_shift": 3.0}
RECIPES: Mapping[str, Recipe] = {
    "lightning-4": Recipe(num_inference_steps=4, **LIGHTNING),
    "lightning-8": Recipe(num_inference_steps=8, **LIGHTNING),
}
"""From the page of ModelTC/Qwen-Image-Lightning: steps, guidance 1, and a constant shift of 3 without terminal stretch.

The files, all in lightx2v/Qwen-Image-Lightning on the hub: Qwen-Image-Lightning-4steps-V2.0.safetensors and -8steps-,
Qwen-Image-Edit-Lightning-4steps-V1.0.safetensors and -8steps-, and in the folder Qwen-Image-Edit-2509
Qwen-Image-Edit-2509-Lightning-4steps-V1.0-fp32.safetensors and -8steps-.
"""


class QwenImageSpec(TextAndImageSpec):
    family = "qwen"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    latents_per_channels = 4
    schedulers = ("euler", "unipc")
    schedules = (SIGMAS,)
    plan = SHARD_PLAN
    control_part, control_pipelines = NETWORK, (CONTROLLED,)
    local_attention = (f"{NETWORK}.{BLOCKS}.*.attn",)
    arrange_fast = staticmethod(partial(lazy("pipelines.models.qwen_image.fast:QwenWeights"), window=PROMPT_WINDOW))
    windowed_prompts = (PROMPT_WINDOW, 2 * PROMPT_WINDOW)
    forward = lazy("pipelines.models.qwen_image.patches:forward")
    patch_blocks = lazy("pipelines.models.qwen_image.patches:patch_blocks")

    def shard_plan(self, config: Config) -> ShardPlan:
        return CONTROL_PLAN if CONTROL in config else SHARD_PLAN

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        return {
            "prompt_embeds": torch.zeros(1, num_tokens, config["joint_attention_dim"]),
            "prompt_embeds_mask": torch.ones(1, num_tokens, dtype=torch.long),
        }

    def blank_pictures(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return a list for editors of several pictures; layers are frames."""
        import torch

        unit, channels = clip_vae_scale(path, 3), read_config(path, "transformer").get("out_channels", 16)
        shape = (1, channels, 1, request.height // unit, request.width // unit)
        pictures = [torch.zeros(shape).movedim(2, 1 if request.num_layers else 2) for _ in range(request.num_pictures)]
        control = {"control_image_latents": torch.zeros(shape)} if request.has_control else {}
        if not pictures:
            return control
        return {**control, "image_latents": pictures if "Plus" in read_index(path)["_class_name"] else pictures[0]}

    def defaults(self, path: Path) -> Defaults:
        """Return Qwen-Image's; an editor takes pictures. ValueError for a control network that takes a mask as well."""
        name = str(read_index(path).get("_class_name"))
        defaults = replace(
            PICTURE,
            width=1328,
            height=1328,
            true_cfg_scale=4.0,
            size_multiple=2 * clip_vae_scale(path, 3),
            max_pictures=1,
            takes_mask=True,
            takes_strength=True,
            strength=0.9,
            max_tokens=MAX_TOKENS,
        )
        if name not in EDITORS:
            defaults = replace(defaults, **_control(path))
        return replace(defaults, **EDITORS[name]) if name in EDITORS else defaults

    def recipes(self, path: Path) -> Mapping[str, Recipe]:
        """Return Lightning's, which splits no picture into layers."""
        return {} if self.defaults(path).max_layers else RECIPES

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return the cards' settings: a negative prompt of one space, and English for one that describes pictures.

        Diffusers' pipelines guide beside a negative prompt only, and their blocks beside an empty one.
        """
        inputs: dict[str, Any] = {"use_en_prompt": True} if request.num_layers else {}
        if request.true_cfg_scale > 1 and request.negative_prompt is None:
            inputs["negative_prompt"] = NOTHING_TO_AVOID
        return inputs

    def fast_weights(self, config: Config) -> ArrangeWeights | None:
        return None if any(config.get(name) for name in WITHOUT_FAST_STEP) else self.arrange_fast

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the call without the mask of its one prompt: it masks nothing, and rules out the fastest attention.

        The control network's call keeps its own arguments; the weight becomes a tensor, so that one captured step
        serves all weights.
        """
        kept = {name: value for name, value in call.items() if name != "encoder_hidden_states_mask"}
        if (control := kept.pop(RESIDUALS, None)) is None:
            return kept
        import torch

        own = {name: control[name] for name in ("controlnet_cond", "encoder_hidden_states")}
        return {**kept, CONTROL: {**own, "scale": torch.tensor(float(control["conditioning_scale"]))}}


def _control(path: Path) -> Mapping[str, Any]:
    defaults = control_defaults(path, NETWORK_CLASS)
    if defaults and read_config(path, NETWORK).get("extra_condition_channels"):
        raise ValueError(
            f"the {NETWORK} of {path} takes a mask beside the control picture: name QwenImageControlNetInpaintPipeline "
            "in the folder's index"
        )
    return defaults


SPEC = QwenImageSpec()
