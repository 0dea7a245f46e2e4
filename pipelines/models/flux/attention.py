"""FLUX attention that calls a kernel: diffusers' projections, norms and rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor, nn

from engines.core.attention import Kernel

Projections = tuple[Tensor, Tensor, Tensor]


class FluxProcessor:
    """An attention processor (diffusers' extension point) around ``kernel``.

    The number of heads is inferred: a tensor-parallel rank holds only some.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over both streams, returning (image, text), or over the one of a single-stream block."""
        assert attention_mask is None, "FLUX attends to every token"
        q_BLHD, k_BLHD, v_BLHD = project_image(attn, hidden_states)
        if encoder_hidden_states is not None:
            text = project_text(attn, encoder_hidden_states)
            pairs = zip(text, (q_BLHD, k_BLHD, v_BLHD), strict=True)
            q_BLHD, k_BLHD, v_BLHD = (torch.cat(pair, dim=1) for pair in pairs)
        if image_rotary_emb is not None:
            q_BLHD, k_BLHD = rotate(q_BLHD, image_rotary_emb), rotate(k_BLHD, image_rotary_emb)
        out_BLC = self.kernel(q_BLHD, k_BLHD, v_BLHD)[0].flatten(2)
        if encoder_hidden_states is None:
            return out_BLC
        return project_out(attn, out_BLC, num_text=encoder_hidden_states.shape[1])


def rotate(x_BLHD: Tensor, cos_sin_LD: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding (Su et al. 2021, arXiv:2104.09864) of neighbouring pairs, in float32."""
    cos_L1D, sin_L1D = (x_LD.unsqueeze(1) for x_LD in cos_sin_LD)
    real, imaginary = torch.unflatten(x_BLHD, -1, (-1, 2)).unbind(-1)
    turned_BLHD = torch.stack((-imaginary, real), dim=-1).flatten(-2)
    return (x_BLHD.float() * cos_L1D + turned_BLHD.float() * sin_L1D).to(x_BLHD.dtype)


def project_image(attn: FluxAttention, hidden_BLC: Tensor) -> Projections:
    """Return q, k and v of the image (or joint) stream, q and k normalised per head."""
    if attn.fused_projections:
        q_BLC, k_BLC, v_BLC = attn.to_qkv(hidden_BLC).chunk(3, dim=-1)
    else:
        q_BLC, k_BLC, v_BLC = attn.to_q(hidden_BLC), attn.to_k(hidden_BLC), attn.to_v(hidden_BLC)
    q_BLHD, k_BLHD, v_BLHD = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q_BLC, k_BLC, v_BLC))
    return attn.norm_q(q_BLHD), attn.norm_k(k_BLHD), v_BLHD


def project_text(attn: FluxAttention, text_BTC: Tensor) -> Projections:
    """Return q, k and v of the text stream, which has its own weights in dual-stream blocks."""
    if attn.fused_projections:
        q_BTC, k_BTC, v_BTC = attn.to_added_qkv(text_BTC).chunk(3, dim=-1)
    else:
        q_BTC, k_BTC, v_BTC = attn.add_q_proj(text_BTC), attn.add_k_proj(text_BTC), attn.add_v_proj(text_BTC)
    q_BTHD, k_BTHD, v_BTHD = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q_BTC, k_BTC, v_BTC))
    return attn.norm_added_q(q_BTHD), attn.norm_added_k(k_BTHD), v_BTHD


def project_out(attn: FluxAttention, out_BLC: Tensor, num_text: int) -> tuple[Tensor, Tensor]:
    """Split the joint result into (image, text) and apply the output projection of each."""
    image_BSC = attn.to_out[1](attn.to_out[0](out_BLC[:, num_text:].contiguous()))
    return image_BSC, attn.to_add_out(out_BLC[:, :num_text].contiguous())


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make every self-attention inside ``module`` call ``kernel``."""
    processor: Any = FluxProcessor(kernel)
    for attention in module.modules():
        if isinstance(attention, FluxAttention):
            attention.set_processor(processor)
