"""Patches of Qwen-Image in diffusers: pictures in the request's size, opacity for layers, and a capturable forward.

If pictures to edit have a timestep of their own (``zero_cond_t``), diffusers' forward makes a tensor of Python values.
No CUDA graph can record that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.modular_pipelines.qwenimage.encoders import QwenImageEditResizeStep, QwenImageLayeredResizeStep
from diffusers.modular_pipelines.qwenimage.modular_blocks_qwenimage_edit import QwenImageEditInpaintVaeEncoderStep
from torch import Tensor

from pipelines.blocks.tree import replace_blocks
from pipelines.models.qwen_image.spec import RESIDUALS
from pipelines.models.spec import first_output, scale_residual


class RequestSizeStep(QwenImageEditResizeStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that resizes the picture to a megapixel, although the noise has the request's size."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam("height"), InputParam("width")]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        image = block_state.image[0] if isinstance(block_state.image, list) else block_state.image
        resize = components.image_resize_processor.resize
        block_state.resized_image = [resize(image, height=block_state.height, width=block_state.width)]
        self.set_block_state(state, block_state)
        return components, state


class RequestSizeEncoderStep(QwenImageEditInpaintVaeEncoderStep):  # type: ignore[misc]
    """Resizes for the VAE alone: the text encoder, with a block of the same class, takes a megapixel."""

    def __init__(self) -> None:
        super().__init__()
        replace_blocks(self, QwenImageEditResizeStep, RequestSizeStep)


class OpacityStep(QwenImageLayeredResizeStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that supports only two sizes, and does not add the opacity that the auto-encoder needs."""

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam.template("image"), InputParam("height"), InputParam("width")]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        image, resize = block_state.image.convert("RGBA"), components.image_resize_processor.resize
        block_state.resized_image = [resize(image, height=block_state.height, width=block_state.width)]
        self.set_block_state(state, block_state)
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, QwenImageLayeredResizeStep, OpacityStep)
    replace_blocks(blocks, QwenImageEditInpaintVaeEncoderStep, RequestSizeEncoderStep)


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return the velocity of the painted picture and of the pictures to edit, (B, N, C)."""
    if module.config.zero_cond_t:
        return _with_two_times(module, **call)
    return first_output(module, _with_residuals(module, **call))


def _with_residuals(module: Any, control: Mapping[str, Tensor] | None = None, **call: Any) -> Mapping[str, Any]:
    """Return the call with what the control network adds to the image tokens, one tensor for several blocks."""
    if control is None:
        return call
    samples = module.controlnet(
        hidden_states=call["hidden_states"],
        timestep=call["timestep"],
        img_shapes=call["img_shapes"],
        encoder_hidden_states=control["encoder_hidden_states"],
        controlnet_cond=control["controlnet_cond"],
        return_dict=False,
    )
    return {**call, RESIDUALS: [scale_residual(x_BNC, control["scale"]) for x_BNC in samples]}


def _with_two_times(
    module: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    img_shapes: Any,
    additional_t_cond: Tensor | None = None,
) -> Tensor:
    """Run ``QwenImageTransformer2DModel.forward`` without a mask.

    Tokens of pictures to edit are modulated by time 0, all others by the step's time.
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
