"""Qwen-Image 2.1's blocks for the painted picture alone, which attends to keys of prompt and reference pictures.

Prompt and references come first and attend only to what precedes them (a picture also to itself). If they have a time
of their own, no step changes them, and their keys and values are computed once a job. Every rank computes them whole;
they are then divided like a stream of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Attention, apply_rotary_emb_qwen
from torch import Tensor, nn

from engines.core.attention import Kernel, Prefix
from engines.core.model import Arguments
from engines.core.tensors import is_exporting
from engines.parallel.copies import is_weightless
from engines.parallel.key_rows import as_operation
from engines.parallel.local_attention import local_kernel
from engines.parallel.offload import on_device
from pipelines.models.qwen_image21.call import CONDITION, GRIDS, LATENTS, PLACES, SLOT, TEXT, TIMESTEP, num_seen

KEYS_VALUES, ROTATION = "seen_keys_values", "rotation"
"""Inputs beside the module's own: (layers, keys and values, B, P seen tokens, H, D), keys rotated; and the rotation of
the picture's queries and keys, complex, (N, D / 2). "Seen" are the tokens of prompt and reference pictures."""

Segment = tuple[int, int, bool]
"""Start and end of a run of tokens, and whether it is text."""


class Segments(NamedTuple):
    """Runs of seen tokens, and their kernel, chosen before a block runs: compiled code cannot look for devices."""

    kernel: Kernel
    runs: tuple[Segment, ...]


class PaintedProcessor:
    """Attention of the painted tokens to the seen ones and to themselves, by ``kernel``."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: QwenImage21Attention,
        hidden_states: Tensor,
        attention_mask: Tensor,
        rotary_emb: Tensor,
        layer_cache: list[Tensor] | None = None,
        segments: Segments | None = None,
        **unused: None,
    ) -> Tensor:
        """Attend; ``attention_mask`` is ``seen_2BPHD``.

        With ``segments`` the tokens are the seen ones; their keys and values are appended to ``layer_cache``.
        """
        q_BLHD, k_BLHD, v_BLHD = _queries_keys_values(attn, hidden_states, rotary_emb)
        if layer_cache is not None:
            assert segments is not None, "only seen tokens are cached"
            layer_cache.append(torch.stack((k_BLHD, v_BLHD)))
            out_BLHD = _attend_seen(q_BLHD, k_BLHD, v_BLHD, segments)
        else:
            k_BMHD, v_BMHD = torch.cat((attention_mask, torch.stack((k_BLHD, v_BLHD))), dim=2).unbind(0)
            out_BLHD, _ = self.kernel(q_BLHD, k_BMHD, v_BMHD)
        out_BLC: Tensor = attn.to_out[0](out_BLHD.flatten(2))
        return out_BLC


def set_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Make the painted tokens' attention call ``kernel``; then call ``module`` through ``forward``."""
    processor: Any = PaintedProcessor(kernel)
    blocks: Any = module.get_submodule("transformer_blocks")
    for block in blocks:
        block.attn.set_processor(processor)


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return the velocity of the painted picture, (B, N, C)."""
    prefix = {name: call[name] for name in (KEYS_VALUES, ROTATION) if name in call}
    prefix = prefix or _encode_seen(module, call, call[TIMESTEP])
    x_BLC: Tensor = module.img_in(call[LATENTS])
    temb_BC, modulation_BC = _modulation(module, call[TIMESTEP], x_BLC)
    for block, seen_2BPHD in zip(module.transformer_blocks, prefix[KEYS_VALUES], strict=True):
        x_BLC = block(x_BLC, modulation_BC, prefix[ROTATION], seen_2BPHD)
    velocity_BNC: Tensor = module.proj_out(module.norm_out(x_BLC, temb_BC))
    return velocity_BNC


def hoisted(module: Any, arguments: Arguments) -> dict[str, Tensor]:
    """Return the words, and pictures to look at: their keys and values. Nothing if words have the picture's time."""
    if not module.config.causal_condition:
        return {}
    return _encode_seen(module, arguments, arguments[TIMESTEP])


def _encode_seen(module: Any, call: Mapping[str, Any], timestep: Tensor) -> dict[str, Tensor]:
    """Return keys and values of seen tokens in all blocks, and the picture's rotation.

    Linears of ``module`` may be split by heads. A token takes half a megabyte in the published model in bfloat16.
    No module is called: hooks on them cut the tokens of the picture.
    """
    if call[TEXT].is_meta or is_weightless(module):  # "meta" has no places; costs once a job are not counted
        return _blank(module, call)
    if is_exporting():
        raise ValueError(
            "this model has pictures between the words of a prompt, at places that no TensorRT engine can read: "
            "use engine: torch"
        )
    text_BTC, is_place_T = module.txt_in(call[TEXT]), call[PLACES][0]
    repeats_T, num = torch.where(is_place_T, SLOT, 1), num_seen(call)
    x_BPC, is_place_P = (
        torch.repeat_interleave(x, repeats_T, dim, output_size=num) for x, dim in ((text_BTC, 1), (is_place_T, 0))
    )
    if CONDITION in call:
        x_BPC[:, is_place_P] = module.img_in.forward(call[CONDITION])
    grids = call[GRIDS][0]
    is_picture_M = torch.cat((is_place_P, is_place_P.new_ones(math.prod(grids[-1]))))
    rotation_MD = module.pos_embed.forward(grids, is_picture_M, device=x_BPC.device)
    numbers_M, _ = module.build_token_metadata(is_picture_M, grids)
    time = timestep.new_zeros(1) if module.config.causal_condition else timestep
    _, modulation_BC = _modulation(module, time, x_BPC)
    several_2BPHD = list[Tensor]()
    runs = tuple(_segments(numbers_M[:num].tolist()))
    segments = Segments(kernel=as_operation(local_kernel(x_BPC.device, x_BPC.dtype)), runs=runs)
    for block in module.transformer_blocks:
        layer_cache = list[Tensor]()  # compiled code is made for a list's length
        options = {"rotary_emb": rotation_MD[:num], "layer_cache": layer_cache, "segments": segments}
        with on_device(block):
            x_BPC = block.forward(x_BPC, modulation_BC, **options)
        several_2BPHD += layer_cache
    return {KEYS_VALUES: torch.stack(several_2BPHD), ROTATION: rotation_MD[num:].clone()}


def _modulation(module: Any, timestep: Tensor, x_BLC: Tensor) -> tuple[Tensor, Tensor]:
    temb_BC: Tensor = module.time_text_embed(timestep.to(x_BLC.dtype), x_BLC)
    return temb_BC, module.modulation(temb_BC)


def _queries_keys_values(attn: Any, x_BLC: Tensor, rotation_LD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, rotated, and v. The number of heads is inferred: a tensor-parallel rank holds only some."""
    head_dim = attn.inner_dim // attn.heads
    q_BLHD, k_BLHD, v_BLHD = (
        torch.unflatten(to(x_BLC), -1, (-1, head_dim)) for to in (attn.to_q, attn.to_k, attn.to_v)
    )
    q_BLHD, k_BLHD = (
        apply_rotary_emb_qwen(norm(x).to(v_BLHD.dtype), rotation_LD, use_real=False)
        for norm, x in ((attn.norm_q, q_BLHD), (attn.norm_k, k_BLHD))
    )
    return q_BLHD, k_BLHD, v_BLHD


def _segments(numbers: list[int]) -> Iterator[Segment]:
    """Yield the runs of equal numbers: -1 for text, its own number for a picture."""
    start = 0
    for number, run in groupby(numbers):
        end = start + len(list(run))
        yield start, end, number < 0
        start = end


def _attend_seen(q_BPHD: Tensor, k_BPHD: Tensor, v_BPHD: Tensor, segments: Segments) -> Tensor:
    """Attend to all earlier segments, and within the own one: all of a picture, or causally in text."""
    places_P = torch.arange(q_BPHD.shape[1], device=q_BPHD.device)
    out = []
    for start, end, is_text in segments.runs:
        prefix = Prefix(reach_L=places_P[start:end] + 1, place_M=places_P[:end]) if is_text else None
        out.append(segments.kernel(q_BPHD[:, start:end], k_BPHD[:, :end], v_BPHD[:, :end], prefix=prefix)[0])
    return torch.cat(out, dim=1)


def _blank(module: Any, call: Mapping[str, Any]) -> dict[str, Tensor]:
    blocks, x_BNC = module.transformer_blocks, call[LATENTS]
    attn = blocks[0].attn
    head_dim = attn.inner_dim // attn.heads
    heads = attn.to_k.out_features // head_dim
    return {
        KEYS_VALUES: x_BNC.new_empty(len(blocks), 2, x_BNC.shape[0], num_seen(call), heads, head_dim),
        ROTATION: x_BNC.new_empty(x_BNC.shape[1], head_dim // 2, dtype=torch.complex64),
    }
