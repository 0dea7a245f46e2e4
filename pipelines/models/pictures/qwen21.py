"""Qwen-Image 2.1: one stream in which words and pictures are seen from later tokens alone.

That attention cannot be cut along the tokens: every rank has them all, and heads are what several ranks divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan
from pipelines.defaults import Defaults
from pipelines.image_sizes import clip_vae_scale
from pipelines.models.architecture import Architecture, Config, without_prompt_mask
from pipelines.models.linears import attention_linears
from pipelines.models.usual_defaults import PICTURE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.kernel import Kernel
    from engines.core.model import Arguments

TOKENS = "tokens"
BLOCKS = "transformer_blocks"
SLOT = 4
"""Latent tokens that a place for a picture in the prompt stands for."""

MAX_PICTURES = 3
"""As many as the editors before it were made for."""

SHARD_PLAN = ShardPlan(
    streams=(TOKENS,),
    blocks=(BLOCKS,),
    shards=(),
    gathers=(),
    linears=(
        *attention_linears(f"{BLOCKS}.*.attn"),
        *(ColumnLinear(pattern=f"{BLOCKS}.*.img_mlp.{name}") for name in ("proj", "gate_layer")),
        RowLinear(pattern=f"{BLOCKS}.*.img_mlp.out"),
    ),
)


def stream_lengths(config: Config, arguments: Arguments) -> dict[str, int]:
    """Pictures stand in the prompt with a place for ``SLOT`` tokens each."""
    num_pictures = math.prod(arguments["hidden_states"].shape[1:2])
    num_places = (num_pictures - math.prod(arguments["img_shapes"][0][-1])) // SLOT
    return {TOKENS: num_pictures + arguments["encoder_hidden_states"].shape[1] - num_places}


def blank_conditioning(config: Config, num_tokens: int) -> Mapping[str, Tensor]:
    import torch

    return {
        "prompt_embeds": torch.zeros(1, num_tokens, config["context_in_dim"]),
        "prompt_embeds_mask": torch.ones(1, num_tokens, dtype=torch.long),
        "image_pad_mask": torch.zeros(1, num_tokens, dtype=torch.bool),
    }


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Nothing: our kernels know no causal attention, and every rank has all tokens."""


def defaults(path: Path) -> Defaults:
    """Returns the pipeline's own arguments in diffusers."""
    return replace(
        PICTURE,
        num_inference_steps=40,
        size_multiple=2 * clip_vae_scale(path, 4),
        max_pictures=MAX_PICTURES,
    )


ARCHITECTURE = Architecture(
    family="qwen",
    defaults=defaults,
    shard_plan=lambda config: SHARD_PLAN,
    stream_lengths=stream_lengths,
    blank_conditioning=blank_conditioning,
    adapted=without_prompt_mask,
    set_kernel=set_kernel,
)
