"""Qwen-Image 2.1: words, and pictures to look at, see what is before them; the picture that is painted sees all.

So they are made once a job, whole on every rank, and the tokens of the picture are divided, which see their keys and
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.image_sizes import clip_vae_scale
from pipelines.models.architecture import Architecture, Config
from pipelines.models.attention.qwen21_call import LATENTS, PLACES, TEXT, adapted, num_seen
from pipelines.models.linears import attention_linears
from pipelines.models.usual_defaults import PICTURE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engines.core.kernel import Kernel
    from engines.core.model import Arguments, ModelInputs

SEEN, PAINTED = "seen", "painted"
BLOCKS = "transformer_blocks"
TYPICAL_TOKENS, MAX_TOKENS = 64, 4096
"""Of a prompt, for steps that nobody asked for, and at most: the pipeline has no limit, the transformer 8192 places."""
MAX_PICTURES = 3
"""As many as the editors before it were made for."""

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
"""Blocks take, in place of a mask, the keys and values of what is seen (see ``attention.qwen21``)."""


def stream_lengths(config: Config, arguments: Arguments) -> dict[str, int]:
    return {SEEN: num_seen(arguments), PAINTED: arguments[LATENTS].shape[1]}


def blank_conditioning(config: Config, num_tokens: int) -> Mapping[str, Tensor]:
    import torch

    num_tokens = TYPICAL_TOKENS if num_tokens in (0, MAX_TOKENS) else num_tokens
    return {
        "prompt_embeds": torch.zeros(1, num_tokens, config["context_in_dim"]),
        "prompt_embeds_mask": torch.ones(1, num_tokens, dtype=torch.long),
        "image_pad_mask": torch.zeros(1, num_tokens, dtype=torch.bool),
    }


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    from pipelines.models.attention import qwen21

    qwen21.set_kernel(module, kernel)


def forward(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    from pipelines.models.attention import qwen21

    return qwen21.forward(module, call)


def hoisted(module: nn.Module, arguments: Arguments) -> ModelInputs:
    """The words, and pictures to look at: their keys and values."""
    from pipelines.models.attention import qwen21

    return qwen21.hoisted(module, arguments)


def defaults(path: Path) -> Defaults:
    """Returns the pipeline's own arguments in diffusers."""
    return replace(
        PICTURE,
        num_inference_steps=40,
        size_multiple=2 * clip_vae_scale(path, 4),
        max_pictures=MAX_PICTURES,
        max_tokens=MAX_TOKENS,
    )


ARCHITECTURE = Architecture(
    family="qwen",
    defaults=defaults,
    shard_plan=lambda config: SHARD_PLAN,
    stream_lengths=stream_lengths,
    blank_conditioning=blank_conditioning,
    adapted=adapted,
    forward=forward,
    set_kernel=set_kernel,
    hoisted=hoisted,
    reads_values=True,
    eager_only="finds out where words and pictures lie in a prompt",
)
