"""Patches of diffusers' blocks and attention of LTX-Video."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormSingle
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from diffusers.modular_pipelines.ltx.denoise import LTXImage2VideoLoopBeforeDenoiser
from torch import Tensor, nn

from engines.fast.records import RotaryTables
from pipelines.blocks import attention
from pipelines.blocks.tree import replace_blocks
from pipelines.models.device_timestep import TimestepOnDevice
from pipelines.models.two_timesteps import TwoTimesteps, replace_class


class LTXPictureLoopBeforeDenoiser(TimestepOnDevice, LTXImage2VideoLoopBeforeDenoiser):  # type: ignore[misc]
    """Makes a timestep a token."""


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, LTXImage2VideoLoopBeforeDenoiser, LTXPictureLoopBeforeDenoiser)


CosSin = tuple[Tensor, Tensor]
"""Tables of all features of a token, ``(B, L, C)`` each, where a pair has every value twice."""


class LTXFusedProcessor(LTXVideoAttnProcessor):  # type: ignore[misc]
    """Normalises and rotates queries and keys in one pass over them, where that is possible."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: CosSin | None = None,
    ) -> Tensor:
        """Attend. The names are those of diffusers, which rotates in self-attention alone."""
        processor: Any = self
        if image_rotary_emb is not None and attention_mask is None and attention.can_rotate(attn, hidden_states):
            tables, image_rotary_emb = neighbours(attn, image_rotary_emb), None
            processor, attn = attention.rotate_and_send(self, attn, hidden_states, tables)
        out_BLC: Tensor = LTXVideoAttnProcessor.__call__(
            processor, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )
        return out_BLC


def neighbours(attn: Any, tables: CosSin) -> RotaryTables:
    cos_BLHP, sin_BLHP = (torch.unflatten(x_BLC[..., ::2], 2, (attn.heads, -1)) for x_BLC in tables)
    return RotaryTables(cos_BLHP, sin_BLHP, interleaved=True)


class LTXTwoTimesteps(TwoTimesteps, AdaLayerNormSingle):  # type: ignore[misc]
    """Modulation of a clip that begins with a picture."""


def replace_processors(module: nn.Module) -> None:
    replace_class(module, "time_embed", LTXTwoTimesteps)
    attention.replace_processors(module, {LTXVideoAttnProcessor: LTXFusedProcessor})
