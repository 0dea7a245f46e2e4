"""Cosmos 3's layers for generated tokens alone; the text's keys and values are computed once a job.

The text attends to itself causally and never to generated tokens (a mixture of transformers, arXiv:2411.04996), so no
step changes it. Every rank computes it whole; its keys and values are then divided like a stream of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.transformers.transformer_cosmos3 import (
    Cosmos3PackedMoTAttention,
    Cosmos3VLTextMoTDecoderLayer,
    Cosmos3VLTextRotaryEmbedding,
)
from torch import Tensor, nn
from torch.nn import functional

from engines.core.attention import Kernel, send_keys
from engines.core.model import ModelInputs
from engines.fast.records import RotaryTables
from engines.fast.rotary import is_fusable, rotated_heads
from engines.parallel.offload import on_device
from pipelines.blocks.attention import row_norm
from pipelines.models.cosmos.call import (
    CLIP_SHAPE,
    LATENTS,
    NOISY_FRAMES,
    POSITIONS,
    SOUND_SHAPE,
    TEXT_IDS,
    TIMESTEP,
    grid,
    num_sound_tokens,
)
from pipelines.models.text_keys import KEYS_VALUES, replace_text
from pipelines.models.two_timesteps import FEW, replace_class

CosSin = tuple[Tensor, Tensor]
"""``(T, D)`` each, for the tokens that are rotated."""


class GenerationProcessor:
    """Attention of the generated tokens to the text's keys and values and to their own, by ``kernel``."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self, attn: Cosmos3PackedMoTAttention, und_seq: Tensor, gen_seq: Tensor, rotary_emb: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Attend. ``und_seq`` is ``text_21TGD``, keys and values; ``gen_seq`` is ``x_LC``. Return no tokens of text."""
        *_, cos_LD, sin_LD = rotary_emb
        k_LGD = _rotated(attn, attn.add_k_proj(gen_seq), attn.norm_added_k, (cos_LD, sin_LD))
        own = (k_LGD, in_heads(attn, attn.add_v_proj(gen_seq)))
        k_1MGD, v_1MGD = (torch.cat((text, x[None]), dim=1) for text, x in zip(und_seq, own, strict=True))
        attend = send_keys(self.kernel, k_1MGD, v_1MGD, gen_seq)
        q_LHD = _rotated(attn, attn.add_q_proj(gen_seq), attn.norm_added_q, (cos_LD, sin_LD))
        out_1LHD = attend(q_LHD[None])
        return gen_seq[:0], attn.to_add_out(out_1LHD[0].flatten(1))


class GenerationLayer(Cosmos3VLTextMoTDecoderLayer):  # type: ignore[misc]
    """Diffusers' layer without its text half: it takes the text's keys and values instead."""

    def forward(self, und_seq: Tensor, gen_seq: Tensor, rotary_emb: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Take and return the same as ``GenerationProcessor``."""
        no_text, attended = self.self_attn(und_seq, self.input_layernorm_moe_gen(gen_seq), rotary_emb)
        residual = gen_seq + attended
        return no_text, residual + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(residual))


class OneTimestep(TimestepEmbedding):  # type: ignore[misc]
    """Diffusers' embedding of tokens with equal timesteps, computed for a few where there are many.

    It is float32: for the 44,160 tokens of 189 frames at 1280x720 it took 34 of a step's 1,415 ms on two H200s.
    """

    def forward(self, sample: Tensor, condition: None = None) -> Tensor:
        """Return ``x_LC`` of ``sample`` (L, features)."""
        few_LC: Tensor = super().forward(sample[:FEW], condition)
        return few_LC if len(few_LC) == len(sample) else few_LC[:1].expand(len(sample), -1)


class Rotation(Cosmos3VLTextRotaryEmbedding):  # type: ignore[misc]
    """Diffusers' tables without its guard against autocast, which fails on "meta"; engines use no autocast."""

    def forward(self, position_ids: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``cos_1LD`` and ``sin_1LD`` of positions (3, 1, L), computed in float32."""
        angles_31LD = position_ids.float()[..., None] * self.inv_freq.float()
        halves_1LD = self.apply_interleaved_mrope(angles_31LD, self.rope_axes_dim)
        angles_1LD = torch.cat((halves_1LD, halves_1LD), dim=-1)
        return angles_1LD.cos().to(dtype), angles_1LD.sin().to(dtype)


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make the generated tokens' attention call ``kernel``; then call ``module`` through ``forward``."""
    processor: Any = GenerationProcessor(kernel)
    module.get_submodule("rotary_emb").__class__ = Rotation
    replace_class(module, "time_embedder", OneTimestep)
    layers: Any = module.get_submodule("layers")
    for layer in layers:
        layer.__class__ = GenerationLayer
        layer.self_attn.set_processor(processor)


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return the velocities of clip and sound, concatenated, (1, all values)."""
    keys_values = call.get(KEYS_VALUES)
    if keys_values is None:
        keys_values = hoisted_text(module, call)[KEYS_VALUES]
    with replace_text(module.layers, keys_values, place=0):
        clips, sounds, _ = module(**without_text(module.config, call), return_dict=False)
    return torch.cat([velocity.flatten() for velocity in (*clips, *(sounds or ()))])[None]


def hoisted_text(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the whole half for the text: its keys and values. Linears may be split by heads.

    They are ``keys_values_N21TGD`` of N layers, keys rotated: 44 MB for 300 tokens of Cosmos 3 Nano in bfloat16.
    """
    x_TC: Tensor = module.embed_tokens(inputs[TEXT_IDS])
    positions_31T = inputs[POSITIONS][:, None, : len(x_TC)]
    # Not by a call: hooks on the rotary embedding cut its output for generated tokens.
    cos_1TD, sin_1TD = module.rotary_emb.forward(positions_31T, device=x_TC.device, dtype=x_TC.dtype)
    rotation, (*layers, last) = (cos_1TD[0], sin_1TD[0]), module.layers
    keys_values = []
    for layer in layers:
        with on_device(layer):
            x_TC, layers_21TGD = _text_layer(layer, x_TC, rotation)
        keys_values.append(layers_21TGD)
    with on_device(last):
        k_TGD, v_TGD = _text_keys_values(last.self_attn, last.input_layernorm(x_TC))
        keys_values.append(_for_generation(last.self_attn, k_TGD, v_TGD, rotation))
    return {KEYS_VALUES: torch.stack(keys_values)}


def _text_layer(layer: Any, x_TC: Tensor, rotation: CosSin) -> tuple[Tensor, Tensor]:
    """Return the text after ``layer``, and its keys and values for generated tokens."""
    attn, normed_TC = layer.self_attn, layer.input_layernorm(x_TC)
    k_TGD, v_TGD = _text_keys_values(attn, normed_TC)
    q_THD = rotate(attn.norm_q(in_heads(attn, attn.to_q(normed_TC))), rotation)
    q_1HTD, k_1GTD, v_1GTD = (x.transpose(0, 1)[None] for x in (q_THD, rotate(k_TGD, rotation), v_TGD))
    out_1HTD = functional.scaled_dot_product_attention(q_1HTD, k_1GTD, v_1GTD, is_causal=True, enable_gqa=True)
    x_TC = x_TC + attn.to_out(out_1HTD[0].transpose(0, 1).flatten(1))
    x_TC = x_TC + layer.mlp(layer.post_attention_layernorm(x_TC))
    return x_TC, _for_generation(attn, k_TGD, v_TGD, rotation)


def _text_keys_values(attn: Any, normed_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values before rotation."""
    return attn.norm_k(in_heads(attn, attn.to_k(normed_TC))), in_heads(attn, attn.to_v(normed_TC))


def _for_generation(attn: Any, k_TGD: Tensor, v_TGD: Tensor, rotation: CosSin) -> Tensor:
    """Return ``text_21TGD``; some models normalise the keys once more for it."""
    if attn.k_norm_und_for_gen is not None:
        k_TGD = attn.k_norm_und_for_gen(k_TGD)
    return torch.stack((rotate(k_TGD, rotation), v_TGD))[:, None]


def without_text(config: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module's own arguments for a sequence without text."""
    num_text, noisy_F, timestep = len(call[TEXT_IDS]), call[NOISY_FRAMES], call[TIMESTEP]
    clip_1CTHW, sounds = _split_latents(call)
    patches = grid(config, call)
    stride, num_clip, num_sound = math.prod(patches[1:]), math.prod(patches), num_sound_tokens(call)
    places_N = torch.arange(num_clip + num_sound, device=noisy_F.device)
    clip_N, sound_N = torch.split(places_N, [num_clip, num_sound])
    with_sound = {
        "sound_tokens": sounds,
        "sound_token_shapes": [(num_sound, 1, 1)],
        "sound_sequence_indexes": sound_N,
        "sound_mse_loss_indexes": sound_N,
        "sound_timesteps": timestep.expand(num_sound),
        "sound_noisy_frame_indexes": [places_N[:num_sound]],
    }
    return {
        "input_ids": call[TEXT_IDS][:0],
        "text_indexes": places_N[:0],
        "position_ids": call[POSITIONS][:, num_text:],
        "und_len": 0,
        "sequence_length": num_clip + num_sound,
        "vision_tokens": [clip_1CTHW],
        "vision_token_shapes": [patches],
        "vision_sequence_indexes": clip_N,
        "vision_mse_loss_indexes": (noisy_F[:, None] * stride + clip_N[:stride]).flatten(),
        "vision_timesteps": timestep.expand(len(noisy_F) * stride),
        "vision_noisy_frame_indexes": [noisy_F],
        **(with_sound if sounds else {}),
    }


def _split_latents(call: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Return ``clip_1CTHW``, and ``sound_CT`` if there is any."""
    shapes = [call[name] for name in (CLIP_SHAPE, SOUND_SHAPE) if name in call]
    parts = torch.split(call[LATENTS][0], [math.prod(shape) for shape in shapes])
    clip, *sounds = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return clip[None], sounds


def in_heads(attn: Any, x_LC: Tensor) -> Tensor:
    """Return ``x_LHD``. The number of heads is inferred: a tensor-parallel rank holds only some."""
    return torch.unflatten(x_LC, 1, (-1, attn.head_dim))


def _rotated(attn: Any, x_LC: Tensor, norm: nn.Module, rotation: CosSin) -> Tensor:
    """Return ``x_LHD``, normalised and rotated, in one pass where that is possible."""
    fused = row_norm(norm)
    if not is_fusable(x_LC, fused):
        return rotate(norm(in_heads(attn, x_LC)), rotation)
    cos_1L1P, sin_1L1P = (table_LD[None, :, None, : attn.head_dim // 2] for table_LD in rotation)
    tables = RotaryTables(cos_1L1P, sin_1L1P, interleaved=False, rounded=True)
    (x_1LHD,) = rotated_heads((x_LC[None],), (fused,), tables, attn.head_dim)
    return x_1LHD[0]


def rotate(x_LHD: Tensor, rotation: CosSin) -> Tensor:
    """Apply rotary embedding of halves (Su et al. 2021, arXiv:2104.09864), in the dtype of ``x``."""
    cos_L1D, sin_L1D = (x_LD[:, None] for x_LD in rotation)
    first, second = x_LHD.chunk(2, dim=-1)
    return x_LHD * cos_L1D + torch.cat((-second, first), dim=-1) * sin_L1D
