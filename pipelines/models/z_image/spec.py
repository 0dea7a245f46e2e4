"""Z-Image and Z-Image-Turbo: one stream of picture and text, both padded to multiples of 32 tokens.

The refiners before it (4 of 34 layers, each over a part of the tokens) run whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.latent_sizes import vae_scale
from pipelines.models.linears import attention_linears
from pipelines.models.spec import PICTURE, Config, ModelSpec, blank_like, distilled, lazy, num_patches
from pipelines.models.z_image.text import PADDED_TO, padded_length
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.model import Arguments, ArrangeWeights

TOKENS = "tokens"
PATCH = 2
MAX_TOKENS = 512
SIZE_MULTIPLE = 16
"""Diffusers' blocks refuse other sizes, whatever the auto-encoder."""

SHARD_PLAN = ShardPlan(
    streams=(TOKENS,),
    blocks=("layers",),
    shards=(
        TokenShard(module="layers.0", where="input", key="x", dim=1, stream=TOKENS),
        TokenShard(module="layers.*", where="input", key="freqs_cis", dim=1, stream=TOKENS),
    ),
    gathers=(TokenGather(module=f"all_final_layer.{PATCH}-1", dim=1, stream=TOKENS),),
    linears=(
        *attention_linears("layers.*.attention"),
        *(ColumnLinear(pattern=f"layers.*.feed_forward.{name}") for name in ("w1", "w3")),
        RowLinear(pattern="layers.*.feed_forward.w2"),
    ),
    free=("cap_feats.0",),
)
REFINERS = ("noise_refiner.*.attention", "context_refiner.*.attention")


PROMPTS = ("prompt_embeds", "negative_prompt_embeds")


GUIDANCE: dict[str, Any] = {"true_cfg_scale": 5.0, "guidance_offset": 1.0}
"""Guidance of 4 on the model's page, counted from the prompt's own prediction."""
BASE = replace(PICTURE, **GUIDANCE, max_pictures=1, takes_strength=True, strength=0.6, max_tokens=MAX_TOKENS)
"""Defaults of the model's page, with 50 steps."""
TURBO = distilled(BASE, 9)
NORM_EPS = 1e-5
"""Epsilon of all norms in blocks; those of queries and keys have it whatever the configuration says."""
BASE_SHIFT = 6.0
"""Shift of the schedule; Turbo's is 3. Their published configurations are otherwise equal."""


class ZImageSpec(ModelSpec):
    family = "z_image"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    plan = SHARD_PLAN
    arrange_fast = lazy("pipelines.models.z_image.fast:ZImageWeights")
    local_attention = REFINERS
    counts_heads = True
    short_prompts = (2 * PADDED_TO,)
    latents = "x.0"
    timestep = "t"
    eager_only = "computes a part of itself under an autocast of its own"

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        num_image = num_patches(arguments["x.0"].shape[2:], (PATCH, PATCH))
        num_text = arguments["cap_feats.0"].shape[0]
        return {TOKENS: padded_length(num_image) + padded_length(num_text)}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Any]:
        import torch

        return {"prompt_embeds": [torch.zeros(num_tokens, config["cap_feat_dim"])]}

    def blank_prediction(self, config: Config, call: Mapping[str, Any]) -> tuple[list[Tensor]]:
        return ([blank_like(x) for x in call["x"]],)

    def pad_conditioning(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Pad prompts as the transformer would, but earlier, so that all of up to 32 tokens share a shape."""
        from pipelines.models.z_image.text import pad_prompt

        return {name: list(map(pad_prompt, value)) if name in PROMPTS else value for name, value in values.items()}

    def forward(self, module: nn.Module, call: Mapping[str, Any]) -> Tensor:
        """Return the prediction ``x_CFHW`` of one picture."""
        from pipelines.models.z_image.text import replace_padding

        with replace_padding(module):
            (prediction,) = module(**call, return_dict=False)[0]
        picture: Tensor = prediction
        return picture

    def to_output(self, config: Config, call: Mapping[str, Any], prediction: Tensor) -> tuple[list[Tensor]]:
        return ([prediction],)

    def fast_weights(self, config: Config) -> ArrangeWeights | None:
        """Return None for a transformer that sees pictures through SigLIP, or has other norms than published ones."""
        has_usual_norms = config.get("norm_eps", NORM_EPS) == NORM_EPS and config.get("qk_norm", True)
        return self.arrange_fast if has_usual_norms and config.get("siglip_feat_dim") is None else None

    def defaults(self, path: Path) -> Defaults:
        """Return Z-Image's or Turbo's, by the schedule. A ``troupe.json`` in the folder overrides them."""
        defaults = BASE if read_config(path, "scheduler").get("shift", 1.0) >= BASE_SHIFT else TURBO
        return replace(defaults, size_multiple=math.lcm(SIZE_MULTIPLE, vae_scale(path) * PATCH))

    def heads(self, config: Config) -> tuple[int, int]:
        return (config["n_heads"], config["dim"] // config["n_heads"])


SPEC = ZImageSpec()
