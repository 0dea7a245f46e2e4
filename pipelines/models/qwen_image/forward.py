"""Qwen-Image's transformer where pictures to edit have a time of their own (``zero_cond_t``): diffusers makes a tensor
of Python values in each of its forwards, which no CUDA graph records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipelines.models.predictions import first_output


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """The velocity of the picture that is painted, and of those that it is made of, (B, N, C)."""
    return _with_two_times(module, **call) if module.config.zero_cond_t else first_output(module, call)


def _with_two_times(
    module: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    img_shapes: Any,
    additional_t_cond: Tensor | None = None,
) -> Tensor:
    """``QwenImageTransformer2DModel.forward`` without a mask.

    Tokens are modulated by the step's time, those of pictures to edit by time 0.
    """
    x_BNC: Tensor = module.img_in(hidden_states)
    text_BTC: Tensor = module.txt_in(module.txt_norm(encoder_hidden_states))
    timestep_B = timestep.to(x_BNC.dtype)
    time_BC: Tensor = module.time_text_embed(torch.cat((timestep_B, 0 * timestep_B)), x_BNC, additional_t_cond)
    rotation = module.pos_embed(img_shapes, max_txt_seq_len=text_BTC.shape[1], device=x_BNC.device)
    num_painted = math.prod(img_shapes[0][0])
    is_given_N = torch.arange(x_BNC.shape[1], device=x_BNC.device) >= num_painted
    is_given_BN = is_given_N.int().expand(len(timestep_B), -1)
    for block in module.transformer_blocks:
        text_BTC, x_BNC = block(
            hidden_states=x_BNC,
            encoder_hidden_states=text_BTC,
            encoder_hidden_states_mask=None,
            temb=time_BC,
            image_rotary_emb=rotation,
            modulate_index=is_given_BN,
        )
    velocity_BNC: Tensor = module.proj_out(module.norm_out(x_BNC, time_BC.chunk(2)[0]))
    return velocity_BNC
