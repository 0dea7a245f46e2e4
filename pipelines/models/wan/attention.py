"""Wan attention: diffusers' projections, norms and rotary embedding; self-attention calls a kernel.

Keys and values of cross-attention depend on text and pictures alone, so a job computes them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanTimeTextImageEmbedding
from torch import Tensor, nn
from torch.nn import functional

from engines.core.attention import EarlyKernel, Kernel
from engines.core.model import ModelInputs
from engines.core.tensors import is_exporting
from engines.fast.records import RotaryTables
from pipelines.blocks.attention import can_rotate, fused_queries_and_keys, send_and_rotate
from pipelines.models import two_timesteps
from pipelines.models.text_keys import KEYS_VALUES, TEXT, forward_with_keys, keys_and_values, stacked_keys_values
from pipelines.models.two_timesteps import of_tokens, replace_class, two_of

PICTURES = "encoder_hidden_states_image"
TEXT_TOKENS = 512
"""Length of padded text in a model that also attends to pictures; it comes after them (as in diffusers)."""


class WanProcessor:
    """An attention processor (diffusers' extension point) for self-attention around ``kernel``.

    The number of heads is inferred: a tensor-parallel rank holds only some.
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
        if isinstance(self.kernel, EarlyKernel) and can_rotate(attn, hidden_states):
            tables, dim = tables_of(rotary_emb), rotary_emb[0].shape[-1]
            attend, q_BLHD, *_ = send_and_rotate(self.kernel, attn, hidden_states, tables, dim)
            return project_out(attn, attend(q_BLHD))
        q_BLHD, k_BLHD = rotated_queries_and_keys(attn, hidden_states, rotary_emb)
        out_BLHD, _ = self.kernel(q_BLHD, k_BLHD, in_heads(attn, attn.to_v(hidden_states)))
        return project_out(attn, out_BLHD)


class CrossProcessor:
    """Attention from video tokens to the text, and to the pictures of a model that has projections for them.

    Every rank holds these whole: no strategy, any number of heads. In their place it also takes their stacked
    ``cross_keys_and_values``.
    """

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
        rotary_emb: None = None,
    ) -> Tensor:
        is_stacked, context = encoder_hidden_states.ndim == 4, encoder_hidden_states
        kv_BTC = context.unbind(0) if is_stacked else cross_keys_and_values(attn, context)
        q_BHLD, *kv_BHTD = (in_heads(attn, x_BLC).transpose(1, 2) for x_BLC in (queries(attn, hidden_states), *kv_BTC))
        *pictures, text = zip(*(_pictures_and_text(attn, x_BHTD, dim=2) for x_BHTD in kv_BHTD), strict=True)
        out_BHLD = functional.scaled_dot_product_attention(q_BHLD, *text)
        for k_BHPD, v_BHPD in pictures:
            out_BHLD = out_BHLD + _attend_picture(q_BHLD, k_BHPD, v_BHPD)
        return project_out(attn, out_BHLD.transpose(1, 2))


def _attend_picture(q_BHLD: Tensor, k_BHPD: Tensor, v_BHPD: Tensor) -> Tensor:
    """Return ``out_BHLD``. In an export each head is an entry of the batch.

    TensorRT-RTX 1.7 crashes on two attentions of a graph that share their queries, as this and the text's do.
    """
    if not is_exporting():
        return functional.scaled_dot_product_attention(q_BHLD, k_BHPD, v_BHPD)
    q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (q_BHLD, k_BHPD, v_BHPD))
    return functional.scaled_dot_product_attention(q, k, v).view_as(q_BHLD)


class TwoTimes(WanTimeTextImageEmbedding):  # type: ignore[misc]
    """Diffusers' embeddings, where the timesteps of tokens are embedded for two rows: of a first picture and others."""

    def forward(
        self,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        timestep_seq_len: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return ``temb_BLC`` and ``modulation_BLM``, and embedded text and pictures. The names are diffusers'."""
        embeddings = encoder_hidden_states, encoder_hidden_states_image
        if timestep_seq_len is None or timestep_seq_len <= two_timesteps.FEW:
            made: tuple[Tensor, Tensor, Tensor, Tensor | None]
            made = super().forward(timestep, *embeddings, timestep_seq_len)
            return made
        times_BL = torch.unflatten(timestep, 0, (-1, timestep_seq_len))
        times_B2, rows_N = two_of(times_BL)
        *of_two, text_BTC, pictures_BPC = super().forward(times_B2.flatten(), *embeddings, 2)
        temb, modulation = (torch.unflatten(of_tokens(x_B2C, rows_N), 0, times_BL.shape) for x_B2C in of_two)
        return temb, modulation, text_BTC, pictures_BPC


def queries(attn: WanAttention, x_BLC: Tensor) -> Tensor:
    """Return queries, normalised over all heads together before the split into heads, as keys are."""
    q_BLC: Tensor = attn.norm_q(attn.to_q(x_BLC))
    return q_BLC


def cross_keys_and_values(attn: WanAttention, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of pictures and text, in this order, each by its own projections."""
    *pictures, text_BTC = _pictures_and_text(attn, x_BTC, dim=1)
    k_BTC, v_BTC = keys_and_values(attn, text_BTC)
    for x_BPC in pictures:
        k_BTC = torch.cat((attn.norm_added_k(attn.add_k_proj(x_BPC)), k_BTC), dim=1)
        v_BTC = torch.cat((attn.add_v_proj(x_BPC), v_BTC), dim=1)
    return k_BTC, v_BTC


def _pictures_and_text(attn: WanAttention, x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return the parts along ``dim`` with separate attention: pictures, if the model has any, and text."""
    if attn.add_k_proj is None:
        return (x,)
    num_pictures = x.shape[dim] - TEXT_TOKENS
    assert num_pictures > 0, f"{x.shape[dim]} tokens, of which {TEXT_TOKENS} are text: there is no picture"
    return torch.split(x, [num_pictures, TEXT_TOKENS], dim=dim)


def in_heads(attn: WanAttention, x_BLC: Tensor) -> Tensor:
    """Return ``x_BLHD``."""
    return torch.unflatten(x_BLC, 2, (-1, attn.inner_dim // attn.heads))


def project_out(attn: WanAttention, out_BLHD: Tensor) -> Tensor:
    out_BLC: Tensor = attn.to_out[1](attn.to_out[0](out_BLHD.flatten(2)))
    return out_BLC


def rotated_queries_and_keys(attn: Any, x_BLC: Tensor, cos_sin_1L1D: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``q_BLHD`` and ``k_BLHD`` of self-attention."""
    dim = cos_sin_1L1D[0].shape[-1]
    if can_rotate(attn, x_BLC):
        q_BLHD, k_BLHD = fused_queries_and_keys(attn, x_BLC, tables_of(cos_sin_1L1D), dim)
    else:
        normed = (attn.norm_q(attn.to_q(x_BLC)), attn.norm_k(attn.to_k(x_BLC)))
        q_BLHD, k_BLHD = (rotate(torch.unflatten(x, 2, (-1, dim)), cos_sin_1L1D) for x in normed)
    return q_BLHD, k_BLHD


def tables_of(cos_sin_1L1D: tuple[Tensor, Tensor]) -> RotaryTables:
    """Return the fused pass' tables from those that hold every value twice."""
    cos_1L1P, sin_1L1P = (table[..., ::2] for table in cos_sin_1L1D)
    return RotaryTables(cos_1L1P, sin_1L1P, interleaved=True)


def rotate(x_BLHD: Tensor, cos_sin_1L1D: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding (Su et al. 2021, arXiv:2104.09864) of neighbouring pairs, in the tables' float32.

    The tables hold every value twice. Same numbers as diffusers' in-place version, but nothing is written through a
    strided view, which exporters and compilers handle badly.
    """
    cos, sin = cos_sin_1L1D[0][..., 0::2], cos_sin_1L1D[1][..., 1::2]
    real, imaginary = torch.unflatten(x_BLHD, -1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return turned.flatten(-2).to(x_BLHD.dtype)


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make every self-attention inside ``module`` call ``kernel`` (cross-attention gets its own processor)."""
    replace_class(module, "condition_embedder", TwoTimes)
    self_processor: Any = WanProcessor(kernel)
    cross_processor: Any = CrossProcessor()
    for attention in module.modules():
        if isinstance(attention, WanAttention):
            attention.set_processor(cross_processor if attention.is_cross_attention else self_processor)


def hoisted_text(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the text's keys and values. The module must be whole.

    Keys are normalised; pictures come before the text. 512 tokens take 420 MB in the 14B model in bfloat16.
    """
    text_BTC: Tensor = module.condition_embedder.text_embedder(inputs[TEXT])
    if PICTURES in inputs:
        text_BTC = torch.cat((module.condition_embedder.image_embedder(inputs[PICTURES]), text_BTC), dim=1)
    attentions = [block.attn2 for block in readers(module)]
    return {KEYS_VALUES: stacked_keys_values(attentions, text_BTC, cross_keys_and_values)}


def readers(module: Any) -> list[Any]:
    """Return the blocks that attend to the text, those of a control clip first."""
    return [*getattr(module, "vace_blocks", ()), *module.blocks]


def forward(module: nn.Module, call: Mapping[str, Any]) -> Tensor:
    """Return ``velocity_BCFHW``."""
    return forward_with_keys(module, readers(module), call)
