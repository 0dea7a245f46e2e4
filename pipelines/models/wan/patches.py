"""Patches of diffusers' Wan blocks: the size of the last frame, and a first picture for Wan 2.2 TI2V.

TI2V has a timestep for each token, for which diffusers has no blocks. The arithmetic is that of
``WanImageToVideoPipeline`` with ``expand_timesteps``. The picture's latents are the clip's first latent frame in every
step, with timestep 0, and the finished latents begin with them. Without a picture, the blocks work as for text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from diffusers.modular_pipelines.wan.denoise import WanDenoiseStep, WanLoopBeforeDenoiser, WanLoopDenoiser
from diffusers.modular_pipelines.wan.encoders import WanImageCropResizeStep, WanVaeEncoderStep, encode_vae_image
from diffusers.modular_pipelines.wan.modular_blocks_wan import WanCoreDenoiseStep
from torch import Tensor

from pipelines.blocks.tree import insert_after, replace_blocks


class KeepLastFrameStep(WanImageCropResizeStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that exchanges width and height; the last frame has the right size already."""

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        block_state.resized_last_image = block_state.last_image
        self.set_block_state(state, block_state)
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, WanImageCropResizeStep, KeepLastFrameStep)


FIRST_FRAME = "first_frame_latents"
"""Latents of the picture, (B, C, 1 frame, H, W), scaled as the transformer sees them; None without a picture."""
LATENTS, PICTURE_BLOCKS = "latents", ("image_encoder", "vae_encoder")


class FirstFrameEncoder(ModularPipelineBlocks):  # type: ignore[misc]  # diffusers has no types
    """Encode the picture alone, in the size of the clip."""

    model_name = "wan"

    @property
    def expected_components(self) -> list[ComponentSpec]:
        parts: list[ComponentSpec] = WanVaeEncoderStep().expected_components
        return parts

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("image"), InputParam("height"), InputParam("width")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(FIRST_FRAME, type_hint=Tensor)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values = self.get_block_state(state)
        values.first_frame_latents = None if values.image is None else _encode(components, values)
        self.set_block_state(state, values)
        return components, state


def _encode(components: Any, values: BlockState) -> Tensor:
    vae, device = components.vae, components._execution_device
    image_BCHW = components.video_processor.preprocess(values.image, height=values.height, width=values.width)
    latents_BCFHW: Tensor = encode_vae_image(
        image_BCHW.unsqueeze(2),
        vae=vae,
        generator=None,
        device=device,
        dtype=vae.dtype,
        latent_channels=vae.config.z_dim,
    )
    return latents_BCFHW.float()


class BeforeDenoiserWithFirstFrame(WanLoopBeforeDenoiser):  # type: ignore[misc]
    """Begin the transformer's input with the picture."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam(FIRST_FRAME)]

    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        latents_BCFHW = with_first_frame(block_state.latents, block_state.first_frame_latents)
        block_state.latent_model_input = latents_BCFHW.to(block_state.dtype)
        return components, block_state


class DenoiserWithFirstFrame(WanLoopDenoiser):  # type: ignore[misc]
    """With a picture, call the transformer with a timestep a token, 0 for the picture's."""

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        adapted = components
        if block_state.first_frame_latents is not None:
            adapted = copy.copy(components)
            times_BL = token_times(t, block_state.latent_model_input, components.patch_size_spatial)
            adapted.transformer = _with_times(components.transformer, times_BL)
        _, block_state = super().__call__(adapted, block_state, i=i, t=t)
        return components, block_state


def _with_times(transformer: Callable[..., Any], times_BL: Tensor) -> Callable[..., Any]:
    return lambda **call: transformer(**{**call, "timestep": times_BL})


class FirstFrameAfterLoop(ModularPipelineBlocks):  # type: ignore[misc]
    """Begin the finished latents with the picture."""

    model_name = "wan"

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(LATENTS, required=True), InputParam(FIRST_FRAME)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(LATENTS, type_hint=Tensor)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        state.set(LATENTS, with_first_frame(state.get(LATENTS), state.get(FIRST_FRAME)))
        return components, state


def with_first_frame(latents_BCFHW: Tensor, frame_BC1HW: Tensor | None) -> Tensor:
    if frame_BC1HW is None:
        return latents_BCFHW
    return torch.cat((frame_BC1HW.to(latents_BCFHW), latents_BCFHW[:, :, 1:]), dim=2)


def token_times(t: Tensor, latents_BCFHW: Tensor, patch: int) -> Tensor:
    """Return the timestep of each token, (B, L) in float32: 0 for the first latent frame, ``t`` for all others."""
    batch, _, frames, height, width = latents_BCFHW.shape
    times_FP = t.float().repeat(frames, (height // patch) * (width // patch))
    times_FP[0] = 0
    return times_FP.flatten().expand(batch, -1)


def extend_blocks(blocks: Any) -> None:
    """Give ``blocks`` an encoder and a loop that take a first picture."""
    for name in PICTURE_BLOCKS:
        blocks.sub_blocks.pop(name, None)
    blocks.sub_blocks["denoise"] = WanCoreDenoiseStep()
    blocks.sub_blocks.insert("vae_encoder", FirstFrameEncoder(), 1)
    replace_blocks(blocks, WanLoopBeforeDenoiser, BeforeDenoiserWithFirstFrame)
    replace_blocks(blocks, WanLoopDenoiser, DenoiserWithFirstFrame)
    insert_after(blocks, WanDenoiseStep, "first_frame", FirstFrameAfterLoop)
