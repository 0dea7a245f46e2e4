"""Wan attention: diffusers' projections, norms and rotary embedding; self-attention calls a kernel."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from torch.nn import functional

from engines.parallel.kernel import Kernel


class KernelProcessor:
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
        q_BLHD, k_BLHD, v_BLHD = project(attn, hidden_states, hidden_states)
        out_BLHD, _ = self.kernel(rotate(q_BLHD, rotary_emb), rotate(k_BLHD, rotary_emb), v_BLHD)
        return project_out(attn, out_BLHD)


class CrossProcessor:
    """Attention from video tokens to the text, which every rank holds whole: no strategy, any number of heads."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
        rotary_emb: None = None,
    ) -> Tensor:
        assert attn.add_k_proj is None, "text to video has no image conditioning"
        q_BLHD, k_BTHD, v_BTHD = project(attn, hidden_states, encoder_hidden_states)
        q_BHLD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q_BLHD, k_BTHD, v_BTHD))
        out_BHLD = functional.scaled_dot_product_attention(q_BHLD, k_BHTD, v_BHTD)
        return project_out(attn, out_BHLD.transpose(1, 2))


def project(attn: WanAttention, query_BLC: Tensor, memory_BMC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; q and k are normalised over all heads together, before they are split into heads."""
    q_BLC, k_BMC = attn.norm_q(attn.to_q(query_BLC)), attn.norm_k(attn.to_k(memory_BMC))
    head_dim = attn.inner_dim // attn.heads
    q_BLHD, k_BMHD, v_BMHD = (x.unflatten(2, (-1, head_dim)) for x in (q_BLC, k_BMC, attn.to_v(memory_BMC)))
    return q_BLHD, k_BMHD, v_BMHD


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
    self_processor: Any = KernelProcessor(kernel)
    cross_processor: Any = CrossProcessor()
    for attention in module.modules():
        if isinstance(attention, WanAttention):
            attention.set_processor(cross_processor if attention.is_cross_attention else self_processor)
