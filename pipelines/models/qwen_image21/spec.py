"""Qwen-Image 2.1: prompt and reference pictures attend to what precedes them; the painted picture attends to all.

So prompt and references are computed once a job, whole on every rank. The painted picture's tokens are divided and
attend to their keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.latent_sizes import clip_vae_scale
from pipelines.models.linears import attention_linears
from pipelines.models.qwen_image21.call import GRIDS, LATENTS, PLACES, TEXT, TIMESTEP, constant_inputs, num_seen
from pipelines.models.spec import PICTURE, Config, ModelSpec, lazy
from pipelines.solver import SIGMAS

if TYPE_CHECKING:
    from torch import Tensor

    from engines.core.model import Arguments

SEEN, PAINTED = "seen", "painted"
BLOCKS = "transformer_blocks"
TYPICAL_TOKENS, MAX_TOKENS = 64, 4096
"""Tokens of a prompt for warm-up, and at most: the pipeline has no limit, the transformer 8192 places."""
MAX_PICTURES = 3
"""The number that earlier editors of the family take."""

SHARD_PLAN = ShardPlan(
    streams=(SEEN, PAINTED),
    blocks=(BLOCKS,),
    shards=(
        TokenShard(module="img_in", where="output", key=0, dim=1, stream=PAINTED),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="rotary_emb", dim=0, stream=PAINTED),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="attention_mask", dim=2, stream=SEEN),
    ),
    gathers=(TokenGather(module="proj_out", dim=1, stream=PAINTED),),
    linears=(
        *attention_linears(f"{BLOCKS}.*.attn"),
        *(ColumnLinear(pattern=f"{BLOCKS}.*.img_mlp.{name}") for name in ("proj", "gate_layer")),
        RowLinear(pattern=f"{BLOCKS}.*.img_mlp.out"),
    ),
    free=(TEXT, PLACES),
)
"""Blocks take, in place of a mask, keys and values of prompt and references (see ``attention``)."""


class QwenImage21Spec(ModelSpec):
    family = "qwen"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    schedulers = ("euler",)
    schedules = (SIGMAS,)
    plan = SHARD_PLAN
    reads_values = True
    eager_only = "finds out where words and pictures lie in a prompt"
    forward = lazy("pipelines.models.qwen_image21.attention:forward")
    set_kernel = lazy("pipelines.models.qwen_image21.attention:set_kernel")
    hoisted = lazy("pipelines.models.qwen_image21.attention:hoisted")
    """Keys and values of prompt and reference pictures."""
    hoists_by_blocks = True

    def hoisted_features(self, config: Config) -> Mapping[str, int]:
        """Return keys and values of all blocks."""
        return {SEEN: 2 * int(config["num_layers"]) * math.prod(self.heads(config))}

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        return {SEEN: num_seen(arguments), PAINTED: arguments[LATENTS].shape[1]}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Tensor]:
        import torch

        num_tokens = TYPICAL_TOKENS if num_tokens in (0, MAX_TOKENS) else num_tokens
        return {
            "prompt_embeds": torch.zeros(1, num_tokens, config["context_in_dim"]),
            "prompt_embeds_mask": torch.ones(1, num_tokens, dtype=torch.long),
            "image_pad_mask": torch.zeros(1, num_tokens, dtype=torch.bool),
        }

    def defaults(self, path: Path) -> Defaults:
        """Return the pipeline's own arguments in diffusers."""
        return replace(
            PICTURE,
            num_inference_steps=40,
            size_multiple=2 * clip_vae_scale(path, 4),
            max_pictures=MAX_PICTURES,
            max_tokens=MAX_TOKENS,
        )

    def adapt_call(self, config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        """Separate the painted picture from the conditioning, whose tensors are the same in every step of a job."""
        num_painted = math.prod(call[GRIDS][0][-1])
        return {
            LATENTS: call[LATENTS][:, -num_painted:],
            TIMESTEP: call[TIMESTEP],
            TEXT: call[TEXT],
            GRIDS: call[GRIDS],
            **constant_inputs(call, num_painted),
        }


SPEC = QwenImage21Spec()
