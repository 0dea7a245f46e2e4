"""Painting inside a mask, for which klein's blocks have no workflow: a step's result counts there alone.

The arithmetic is that of diffusers' ``Flux2KleinInpaintPipeline``: the picture is the first that the model looks at as
well, and what lies outside the mask is the picture itself with the noise that belongs to the step.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux2.before_denoise import Flux2PrepareLatentsStep, Flux2SetTimestepsStep
from diffusers.modular_pipelines.flux2.denoise import Flux2LoopAfterDenoiser
from diffusers.modular_pipelines.flux2.encoders import Flux2VaeEncoderStep
from diffusers.modular_pipelines.flux2.modular_blocks_flux2_klein import Flux2KleinAutoBlocks
from diffusers.modular_pipelines.flux2.modular_blocks_flux2_klein_base import Flux2KleinBaseAutoBlocks
from diffusers.modular_pipelines.modular_pipeline import BlockState, ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.nn import functional as F

from pipelines.blocks.tree import insert_after

STRENGTH = 0.8
"""diffusers' own where a request says none."""
KEPT, PAINTED, NOISE = "kept_latents", "painted_part", "kept_noise"
"""The picture's latents, how much of each token is painted anew, and the noise that the job begins with."""


WORKFLOW = {"image_conditioned_inpainting": {"image": True, "mask_image": True, "prompt": True}}


class MaskedPictureStep(Flux2VaeEncoderStep):  # type: ignore[misc]  # diffusers has no types
    """Encodes the picture in the size of the result, beside what the model looks at, and brings the mask to tokens."""

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name) for name in ("image", "mask_image", "height", "width", "generator")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in (KEPT, PAINTED)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        has_mask = block_state.mask_image is not None
        setattr(block_state, KEPT, self._kept(components, block_state) if has_mask else None)
        setattr(block_state, PAINTED, _painted(components, block_state) if has_mask else None)
        self.set_block_state(state, block_state)
        return components, state

    def _kept(self, components: Any, block_state: BlockState) -> Tensor:
        """Shape (1, tokens, channels)."""
        images = block_state.image if isinstance(block_state.image, list) else [block_state.image]
        size = {"height": block_state.height, "width": block_state.width}
        image_BCHW = components.image_processor.preprocess(images[0], **size, resize_mode="crop")
        image_BCHW = image_BCHW.to(components._execution_device, components.vae.dtype)
        return _packed(self._encode_vae_image(components.vae, image_BCHW, block_state.generator))


class MaskedStartStep(ModularPipelineBlocks):  # type: ignore[misc]
    """Begins with the picture under as much noise as ``strength`` says, and leaves out the steps before that."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("scheduler", FlowMatchEulerDiscreteScheduler)]

    @property
    def inputs(self) -> list[InputParam]:
        names = (KEPT, "latents", "timesteps", "num_inference_steps")
        return [InputParam("strength", default=STRENGTH), *map(InputParam, names)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in ("latents", NOISE, "timesteps", "num_inference_steps")]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        setattr(block_state, NOISE, block_state.latents)
        kept = getattr(block_state, KEPT)
        if kept is not None:
            scheduler, num_steps = components.scheduler, block_state.num_inference_steps
            first = int(max(num_steps - min(num_steps * block_state.strength, num_steps), 0))
            scheduler.set_begin_index(first)
            block_state.timesteps = scheduler.timesteps[first:]
            block_state.num_inference_steps = num_steps - first
            block_state.latents = scheduler.scale_noise(kept, block_state.timesteps[:1], block_state.latents)
        self.set_block_state(state, block_state)
        return components, state


class KeepOutsideStep(ModularPipelineBlocks):  # type: ignore[misc]
    """Puts the picture back outside the mask, under the noise that the next step expects."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("scheduler", FlowMatchEulerDiscreteScheduler)]

    @property
    def inputs(self) -> list[InputParam]:
        return list(map(InputParam, (KEPT, PAINTED, NOISE, "latents", "timesteps")))

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents")]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        painted = getattr(block_state, PAINTED)
        if painted is not None:
            kept = getattr(block_state, KEPT)
            if i + 1 < len(block_state.timesteps):
                after = block_state.timesteps[i + 1 : i + 2]
                kept = components.scheduler.scale_noise(kept, after, getattr(block_state, NOISE))
            block_state.latents = (1 - painted) * kept + painted * block_state.latents
        return components, block_state


def patch_blocks(blocks: Any) -> None:
    if not isinstance(blocks, Flux2KleinAutoBlocks | Flux2KleinBaseAutoBlocks):
        return
    blocks._workflow_map = {**blocks._workflow_map, **WORKFLOW}
    insert_after(blocks, Flux2VaeEncoderStep, "masked_picture", MaskedPictureStep)
    insert_after(blocks, Flux2SetTimestepsStep, "masked_start", MaskedStartStep)
    insert_after(blocks, Flux2LoopAfterDenoiser, "keep_outside", KeepOutsideStep)


def _packed(x_BCHW: Tensor) -> Tensor:
    packed: Tensor = Flux2PrepareLatentsStep._pack_latents(x_BCHW)
    return packed


def _painted(components: Any, block_state: BlockState) -> Tensor:
    """Shape (1, tokens, 1); 1 where all of a token is painted."""
    token = components.vae_scale_factor * 2
    size = {"height": block_state.height, "width": block_state.width}
    processor = VaeImageProcessor(
        vae_scale_factor=token, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    mask_B1HW = processor.preprocess(block_state.mask_image, **size, resize_mode="crop")
    tokens = (block_state.height // token, block_state.width // token)
    mask_B1HW = F.interpolate(mask_B1HW, size=tokens, mode="bilinear")
    return _packed(mask_B1HW.to(components._execution_device, components.vae.dtype))
