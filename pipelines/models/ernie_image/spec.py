"""ERNIE-Image: one stream, the picture's tokens before the text's, the sequence as the first dim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.core.shard_plan import ShardPlan, TokenGather, TokenShard
from pipelines.defaults import Defaults
from pipelines.directory import read_config
from pipelines.models.spec import PICTURE, Config, ModelSpec, num_patches

if TYPE_CHECKING:
    from torch import nn

    from engines.core.attention import Kernel
    from engines.core.model import Arguments

TOKENS = "tokens"
BLOCKS = "layers"
TYPICAL_TOKENS = 512
"""Tokens of a prompt for warm-up; the model takes as many as its tokenizer gives."""

SHARD_PLAN = ShardPlan(
    streams=(TOKENS,),
    blocks=(BLOCKS,),
    shards=(
        TokenShard(module=f"{BLOCKS}.0", where="input", key="x", dim=0, stream=TOKENS),
        TokenShard(module=f"{BLOCKS}.*", where="input", key="temb", dim=0, stream=TOKENS),
        TokenShard(module="pos_embed", where="output", key=0, dim=1, stream=TOKENS),
    ),
    gathers=(TokenGather(module="final_linear", dim=0, stream=TOKENS),),
    linears=(),
    free=("text_bth", "text_lens"),
)


def _patch(path: Path) -> int:
    patch: int = read_config(path, "transformer").get("patch_size", 1)
    return patch


class ErnieImageSpec(ModelSpec):
    family = "ernie_image"
    dynamic_shapes = True
    latent_channels = ("in_channels",)
    latents_per_channels = 4
    schedulers = ("euler",)
    plan = SHARD_PLAN
    eager_only = "computes a part of itself under an autocast of its own"

    def stream_lengths(self, config: Config, arguments: Arguments) -> dict[str, int]:
        num_image = num_patches(arguments["hidden_states"].shape[2:], (config["patch_size"],) * 2)
        return {TOKENS: num_image + arguments["text_bth"].shape[1]}

    def blank_conditioning(self, config: Config, num_tokens: int) -> Mapping[str, Any]:
        import torch

        return {"prompt_embeds": [torch.zeros(num_tokens or TYPICAL_TOKENS, config["text_in_dim"])]}

    def set_kernel(self, module: nn.Module, kernel: Kernel) -> None:
        from pipelines.blocks import attention

        attention.set_kernel(module, attention.unmasked(kernel))

    def defaults(self, path: Path) -> Defaults:
        """Return the defaults of diffusers' blocks."""
        return replace(
            PICTURE,
            true_cfg_scale=4.0,
            size_multiple=2 ** len(read_config(path, "vae")["block_out_channels"]) * _patch(path),
        )

    def heads(self, config: Config) -> tuple[int, int]:
        return (config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"])


SPEC = ErnieImageSpec()
