"""Ideogram 4: one stream of text and picture. A second transformer predicts without the prompt, in every step.

The two predictions are combined by a scale for each step, of which the last few have a lower one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.latent_sizes import vae_scale
from pipelines.models.linears import attention_linears
from pipelines.models.makers_layers import MakersLayers
from pipelines.models.spec import PICTURE, Config, ModelSpec, lazy
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from torch import nn

    from engines.core.attention import Kernel
    from engines.core.model import Arguments

TOKENS = "tokens"
BLOCKS = "layers"
PACKED = ("hidden_states", "encoder_hidden_states", "position_ids", "indicator")
"""Inputs with an entry for each token."""
PATCH = 2
"""Latents a token along each side, which no configuration says."""
TYPICAL_TOKENS, MAX_TOKENS = 300, 2048
"""Tokens of a prompt for warm-up, as the model reads descriptions of a paragraph, and at most."""
SCALE, LAST_SCALE = 7.0, 3.0
"""Guidance of the first steps, and of the last ones."""

SHARD_PLAN = ShardPlan(
    streams=(TOKENS,),
    blocks=(BLOCKS,),
    shards=tuple(TokenShard(module="", where="input", key=key, dim=1, stream=TOKENS) for key in PACKED),
    gathers=(TokenGather(module="final_layer", dim=1, stream=TOKENS),),
    linears=(
        *attention_linears(f"{BLOCKS}.*.attention"),
        *(ColumnLinear(pattern=f"{BLOCKS}.*.feed_forward.{name}") for name in ("w1", "w3")),
        RowLinear(pattern=f"{BLOCKS}.*.feed_forward.w2"),
    ),
)

MAKERS_LAYERS: MakersLayers = {
    r"layers\.(\d+)\.attention\.qkv": tuple(rf"{BLOCKS}.\1.attention.to_{one}" for one in "qkv"),
    r"layers\.(\d+)\.attention\.o": (rf"{BLOCKS}.\1.attention.to_out.0",),
    "(.*)": (r"\1",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A published way to sample."""

    num_steps: int
    """Number of steps that it was published for."""
    num_last: int
    """Steps at the end whose guidance has ``LAST_SCALE``, if the request has the default scale."""
    mu: float
    """Mean of the logit-normal schedule of noise."""
    std: float
    """Standard deviation of the same schedule."""


PRESETS = (
    Preset(num_steps=12, num_last=1, mu=0.5, std=1.75),
    Preset(num_steps=20, num_last=2, mu=0.0, std=1.75),
    Preset(num_steps=48, num_last=3, mu=0.0, std=1.5),
)
"""V4_TURBO_12, V4_DEFAULT_20 and V4_QUALITY_48 of github.com/ideogram-oss/ideogram4. The last is diffusers' default."""


def preset_for(num_steps: int) -> Preset:
    """Return the shortest preset that has ``num_steps``, or the longest."""
    return next((preset for preset in PRESETS if num_steps <= preset.num_steps), PRESETS[-1])


def guidance_schedule(num_steps: int, scale: float) -> tuple[float, ...]:
    """Return the scale of each step: of a preset for the default ``scale``, else ``scale`` in all of them."""
    num_last = min(preset_for(num_steps).num_last, num_steps) if scale == SCALE else 0
    return (scale,) * (num_steps - num_last) + (LAST_SCALE,) * num_last


class Ideogram4Spec(ModelSpec):
    family = "ideogram4"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    latents_per_channels = PATCH**2
    plan = SHARD_PLAN
    makers_layers = MAKERS_LAYERS
    has_own_guidance = True
    eager_only = "computes a part of itself under an autocast of its own"
    patch_blocks = lazy("pipelines.models.ideogram4.patches:patch_blocks")
    hoisted = lazy("pipelines.models.ideogram4.text:hoisted")
    forward = lazy("pipelines.models.ideogram4.text:forward")

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {TOKENS: arguments["hidden_states"].shape[1]}

    def hoisted_numbers(self, config: Config) -> int:
        return math.prod(self.heads(config)) * MAX_TOKENS

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Any]:
        import torch

        number = num_tokens or TYPICAL_TOKENS
        return {"text_features": torch.zeros(1, number, config["llm_features_dim"]), "text_lengths": [number]}

    def set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        from pipelines.blocks import attention

        attention.set_kernel(module, attention.unmasked(kernel))
        for inner in module.modules():
            each: Any = inner
            if hasattr(each, "to_q"):  # a rank may hold a share of the heads
                each.num_heads = each.to_q.out_features // each.head_dim

    def pipeline_inputs(self, path: Path, request: MediaRequest) -> Mapping[str, Any]:
        """Return the schedules of noise and guidance, of a preset by the number of steps."""
        num_steps = request.num_inference_steps
        preset = preset_for(num_steps)
        scales = guidance_schedule(num_steps, request.guidance_scale)
        return {"guidance_schedule": scales, "mu": preset.mu, "std": preset.std}

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' pipeline. Another scale than the default's holds in all steps."""
        return replace(
            PICTURE,
            width=2048,
            height=2048,
            num_inference_steps=PRESETS[-1].num_steps,
            guidance_scale=SCALE,
            takes_guidance=False,
            size_multiple=PATCH * vae_scale(path),
            max_tokens=MAX_TOKENS,
        )


SPEC = Ideogram4Spec()
