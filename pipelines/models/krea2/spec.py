"""Krea 2 and its distilled form: one stream of text and picture. Every rank fuses the whole text, once a job.

Its guider counts from the conditional prediction (``cond + scale * (cond - uncond)``), and so do its scales here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_index
from pipelines.latent_sizes import clip_vae_scale
from pipelines.models.padding import shorten_prompts
from pipelines.models.spec import PICTURE, Config, ModelSpec, distilled, lazy
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

TOKENS = "tokens"
BLOCKS = "transformer_blocks"
MASK = "encoder_attention_mask"
PATCH = 2
MAX_TOKENS = 512
"""Each prompt is padded to this length; a mask marks its own tokens."""
SHORT_PROMPT = 128
"""Length of a step's text if the prompt's own tokens fit."""


BASE = replace(PICTURE, num_inference_steps=28, true_cfg_scale=5.5, guidance_offset=1.0, max_tokens=MAX_TOKENS)
"""Defaults of diffusers' blocks, with their guidance of 4.5 counted from the prompt's own prediction."""
TURBO = distilled(BASE, 8)


class Krea2Spec(ModelSpec):
    family = "krea2"
    latent_channels = ("in_channels",)
    latents_per_channels = PATCH**2
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    local_attention = ("text_fusion.layerwise_blocks.*.attn", "text_fusion.refiner_blocks.*.attn")
    eager_only = "masks keys (text of several lengths)"
    replace_processors = lazy("pipelines.models.krea2.text:replace_processors")
    forward = lazy("pipelines.models.krea2.text:forward")
    hoisted = lazy("pipelines.models.krea2.text:hoisted_text")
    """The text after the layers that fuse it."""
    hoisted_inputs = ("encoder_hidden_states", MASK)
    hoists_by_blocks = True
    short_prompts = (SHORT_PROMPT,)

    def shard_plan(self, config: Config) -> ShardPlan:
        """Return the plan. Tokens are joined after the last block, where the text is cut off."""
        return ShardPlan(
            streams=(TOKENS,),
            blocks=(BLOCKS,),
            shards=(
                TokenShard(module=f"{BLOCKS}.0", where="input", key="hidden_states", dim=1, stream=TOKENS),
                TokenShard(module=f"{BLOCKS}.*", where="input", key="attention_mask", dim=3, stream=TOKENS),
                TokenShard(module="rotary_emb", where="output", key=0, dim=0, stream=TOKENS),
                TokenShard(module="rotary_emb", where="output", key=1, dim=0, stream=TOKENS),
            ),
            gathers=(TokenGather(module=f"{BLOCKS}.{config['num_layers'] - 1}", dim=1, stream=TOKENS),),
            linears=(),
        )

    def hoisted_numbers(self, config: Config) -> int:
        return MAX_TOKENS * int(config["text_hidden_dim"])

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {TOKENS: arguments["encoder_hidden_states"].shape[1] + arguments["hidden_states"].shape[1]}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        features = torch.zeros(1, num_tokens, config["num_text_layers"], config["text_hidden_dim"])
        return {"prompt_embeds": features, "prompt_embeds_mask": torch.ones(1, num_tokens, dtype=torch.bool)}

    def pad_conditioning(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``values`` with less padding: text has no positions."""
        return shorten_prompts(values, {("prompt_embeds", "prompt_embeds_mask"): SHORT_PROMPT})

    def defaults(self, path: Path) -> Defaults:
        defaults = TURBO if read_index(path).get("is_distilled") else BASE
        return replace(defaults, size_multiple=PATCH * clip_vae_scale(path, 3))


SPEC = Krea2Spec()
