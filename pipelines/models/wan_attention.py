"""Wan attention: diffusers' projections, norms and rotary embedding; self-attention calls a kernel."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from torch.nn import functional

from engines.core.kernel import Kernel


class WanProcessor:
    """An attention processor (diffusers' extension point) for self-attention around ``kernel``.

    The number of heads is read off the tensors: a tensor-parallel rank holds only some of them.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is None, "cross-attention has a processor of its own"
        assert attention_mask is None, "Wan attends to every token"
        assert rotary_emb is not None
        q_BLHD, k_BLHD, v_BLHD = (
            in_heads(attn, x) for x in (queries(attn, hidden_states), *keys_and_values(attn, hidden_states))
        )
        out_BLHD, _ = self.kernel(rotate(q_BLHD, rotary_emb), rotate(k_BLHD, rotary_emb), v_BLHD)
        return project_out(attn, out_BLHD)


class CrossProcessor:
    """Attention from video tokens to the text, which every rank holds whole: no strategy, any number of heads.

    In place of the text it takes what ``keys_and_values`` makes of it, stacked.
    """

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
        rotary_emb: None = None,
    ) -> Tensor:
        assert attn.add_k_proj is None, "text to video has no image conditioning"
        is_made = encoder_hidden_states.ndim == 4
        k_BTC, v_BTC = encoder_hidden_states.unbind(0) if is_made else keys_and_values(attn, encoder_hidden_states)
        several = (queries(attn, hidden_states), k_BTC, v_BTC)
        q_BHLD, k_BHTD, v_BHTD = (in_heads(attn, x_BLC).transpose(1, 2) for x_BLC in several)
        out_BHLD = functional.scaled_dot_product_attention(q_BHLD, k_BHTD, v_BHTD)
        return project_out(attn, out_BHLD.transpose(1, 2))


def queries(attn: WanAttention, x_BLC: Tensor) -> Tensor:
    """Normalised over all heads together, before they are split into heads; so are the keys."""
    q_BLC: Tensor = attn.norm_q(attn.to_q(x_BLC))
    return q_BLC


def keys_and_values(attn: WanAttention, x_BMC: Tensor) -> tuple[Tensor, Tensor]:
    return attn.norm_k(attn.to_k(x_BMC)), attn.to_v(x_BMC)


def in_heads(attn: WanAttention, x_BLC: Tensor) -> Tensor:
    """``x_BLHD``."""
    return torch.unflatten(x_BLC, 2, (-1, attn.inner_dim // attn.heads))


def project_out(attn: WanAttention, out_BLHD: Tensor) -> Tensor:
    out_BLC: Tensor = attn.to_out[1](attn.to_out[0](out_BLHD.flatten(2)))
    return out_BLC


def rotate(x_BLHD: Tensor, cos_sin_1L1D: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) of neighbouring pairs, in the tables' float32.

    The tables hold every value twice. Same numbers as diffusers' in-place version, but nothing is written through a
    strided view, which exporters and compilers handle badly.
    """
    cos, sin = cos_sin_1L1D[0][..., 0::2], cos_sin_1L1D[1][..., 1::2]
    real, imaginary = torch.unflatten(x_BLHD, -1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return turned.flatten(-2).to(x_BLHD.dtype)


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make every self-attention inside ``module`` call ``kernel`` (cross-attention gets its own processor)."""
    self_processor: Any = WanProcessor(kernel)
    cross_processor: Any = CrossProcessor()
    for attention in module.modules():
        if isinstance(attention, WanAttention):
            attention.set_processor(cross_processor if attention.is_cross_attention else self_processor)
