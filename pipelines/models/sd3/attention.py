"""Joint attention of Stable Diffusion 3 that calls a kernel: diffusers' projections and norms, the picture first."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from engines.core.attention import Kernel


class JointProcessor:
    """An attention processor (diffusers' extension point) around ``kernel``.

    The number of heads is inferred: a tensor-parallel rank holds only some. The last block returns no text.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        **unused: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        dim = attn.inner_dim // attn.heads
        q_BLHD = _normalize(_heads(attn.to_q(hidden_states), dim), attn.norm_q)
        k_BLHD = _normalize(_heads(attn.to_k(hidden_states), dim), attn.norm_k)
        v_BLHD = _heads(attn.to_v(hidden_states), dim)
        if encoder_hidden_states is None:
            return _project_out(attn, self.kernel(q_BLHD, k_BLHD, v_BLHD)[0].flatten(2))
        text = encoder_hidden_states
        q_BTHD = _normalize(_heads(attn.add_q_proj(text), dim), attn.norm_added_q)
        k_BTHD = _normalize(_heads(attn.add_k_proj(text), dim), attn.norm_added_k)
        v_BTHD = _heads(attn.add_v_proj(text), dim)
        pairs = ((q_BLHD, q_BTHD), (k_BLHD, k_BTHD), (v_BLHD, v_BTHD))
        out_BLC = self.kernel(*(torch.cat(pair, dim=1) for pair in pairs))[0].flatten(2)
        num_image = hidden_states.shape[1]
        out_BSC, out_BTC = out_BLC[:, :num_image], out_BLC[:, num_image:]
        return _project_out(attn, out_BSC), out_BTC if attn.context_pre_only else attn.to_add_out(out_BTC)


def _heads(x_BLC: Tensor, dim: int) -> Tensor:
    return torch.unflatten(x_BLC, -1, (-1, dim))


def _normalize(x_BLHD: Tensor, norm: nn.Module | None) -> Tensor:
    if norm is None:
        return x_BLHD
    normed: Tensor = norm(x_BLHD)
    return normed


def _project_out(attn: Any, out_BLC: Tensor) -> Tensor:
    projected: Tensor = attn.to_out[1](attn.to_out[0](out_BLC))
    return projected


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make every attention inside ``module`` call ``kernel``."""
    processor: Any = JointProcessor(kernel)
    for attention in module.modules():
        if isinstance(attention, Attention):
            attention.set_processor(processor)
