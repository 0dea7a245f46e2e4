"""HunyuanVideo 1.5's step without a host read of the text's length, which diffusers' has.

Diffusers moves padding to the end of the text, where it attends to itself. Here padding stays in place and is masked.
Text has no positions, so the clip is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from engines.core.attention import Kernel
from engines.fast.records import RotaryTables
from pipelines.blocks.attention import can_rotate, fused_queries_and_keys

GLYPHS, PICTURE = 1, 2
"""Kinds of text tokens beside those of the prompt, as ``cond_type_embed`` numbers them."""


class HunyuanVideoProcessor:
    """An attention processor for clip and text together around ``kernel``, with a mask of the text's tokens.

    The number of heads is inferred: a tensor-parallel rank holds only some.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        clip = _clip_heads(attn, hidden_states, image_rotary_emb)
        layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = _heads(attn, encoder_hidden_states, layers, (attn.norm_added_q, attn.norm_added_k))
        joined = (torch.cat(pair, dim=1) for pair in zip(clip, text, strict=True))
        mask_BM = nn.functional.pad(attention_mask, (hidden_states.shape[1], 0), value=True)
        out_BLC = self.kernel(*joined, mask_BM=mask_BM)[0].flatten(2)
        out_clip, out_text = torch.split(out_BLC, [hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](out_clip)), attn.to_add_out(out_text)


def _clip_heads(attn: Any, x_BLC: Tensor, tables_LD: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``_heads`` does, rotated. The tables have the values of a pair, of neighbours, twice."""
    if can_rotate(attn, x_BLC):
        dim = attn.inner_dim // attn.heads
        cos_1L1P, sin_1L1P = (table_LD[None, :, None, ::2] for table_LD in tables_LD)
        tables = RotaryTables(cos_1L1P, sin_1L1P, interleaved=True)
        q_BLHD, k_BLHD = fused_queries_and_keys(attn, x_BLC, tables, dim)
        return q_BLHD, k_BLHD, torch.unflatten(attn.to_v(x_BLC), 2, (-1, dim))
    q, k, v = _heads(attn, x_BLC, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
    return *(apply_rotary_emb(x, tables_LD, sequence_dim=1) for x in (q, k)), v


def _heads(
    attn: Any, x_BLC: Tensor, layers: tuple[nn.Module, ...], norms: tuple[nn.Module, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised queries and keys, and values, (B, L, H, D)."""
    q, k, v = (torch.unflatten(layer(x_BLC), 2, (-1, attn.inner_dim // attn.heads)) for layer in layers)
    return norms[0](q), norms[1](k), v


def set_kernel(module: Any, kernel: Kernel) -> None:
    processor: Any = HunyuanVideoProcessor(kernel)
    for block in module.transformer_blocks:
        block.attn.set_processor(processor)


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return ``velocity_BCFHW``."""
    latents_BCFHW, timestep_B = call["hidden_states"], call["timestep"]
    positions = module.rope(latents_BCFHW)
    time_BC = module.time_embed(timestep_B, timestep_r=call.get("timestep_r"))
    text_BTC, mask_BT = _text(module, call)
    clip_BLC = module.x_embedder(latents_BCFHW)
    for block in module.transformer_blocks:
        clip_BLC, text_BTC = block(clip_BLC, text_BTC, time_BC, mask_BT, positions)
    patches_BLP = module.proj_out(module.norm_out(clip_BLC, time_BC))
    return _unpatch(patches_BLP, latents_BCFHW.shape[2:], module.config)


def _text(module: Any, call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return tokens of picture, glyphs and prompt, and a mask that is False for padding."""
    prompt_mask, glyph_mask = (call[f"encoder_attention_mask{suffix}"].bool() for suffix in ("", "_2"))
    prompt_BTC = module.context_embedder(call["encoder_hidden_states"], call["timestep"], prompt_mask)
    parts = [(_add_kind(module, module.context_embedder_2(call["encoder_hidden_states_2"]), GLYPHS), glyph_mask)]
    parts.append((_add_kind(module, prompt_BTC, 0), prompt_mask))
    if "image_embeds" in call:
        picture_BTC = _add_kind(module, module.image_embedder(call["image_embeds"]), PICTURE)
        parts.insert(0, (picture_BTC, torch.ones_like(picture_BTC[..., 0], dtype=torch.bool)))
    text_BTC, mask_BT = (torch.cat(several, dim=1) for several in zip(*parts, strict=True))
    return text_BTC.masked_fill(~mask_BT[..., None], 0.0), mask_BT


def _add_kind(module: Any, x_BTC: Tensor, kind: int) -> Tensor:
    shifted_BTC: Tensor = x_BTC + module.cond_type_embed.weight[kind]
    return shifted_BTC


def _unpatch(patches_BLP: Tensor, grid: torch.Size, config: Any) -> Tensor:
    """Return (B, channels, frames, rows, columns) from (B, tokens, values of a patch)."""
    t, p = config.patch_size_t, config.patch_size
    frames, rows, columns = grid[0] // t, grid[1] // p, grid[2] // p
    split = patches_BLP.reshape(len(patches_BLP), frames, rows, columns, -1, t, p, p)
    return split.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(patches_BLP), -1, *grid)
