"""Positions of pictures joined once a job, and inpainting for klein, whose blocks have no such workflow.

A step of inpainting changes only the inside of the mask. The arithmetic is that of diffusers'
``Flux2KleinInpaintPipeline``. The picture is also the first reference picture. Outside the mask, the latents are the
picture with the step's noise.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux2.before_denoise import Flux2PrepareLatentsStep, Flux2SetTimestepsStep
from diffusers.modular_pipelines.flux2.denoise import (
    Flux2KleinBaseLoopDenoiser,
    Flux2KleinLoopDenoiser,
    Flux2LoopAfterDenoiser,
    Flux2LoopDenoiser,
)
from diffusers.modular_pipelines.flux2.encoders import Flux2VaeEncoderStep
from diffusers.modular_pipelines.flux2.modular_blocks_flux2_klein import Flux2KleinAutoBlocks
from diffusers.modular_pipelines.flux2.modular_blocks_flux2_klein_base import Flux2KleinBaseAutoBlocks
from diffusers.modular_pipelines.modular_pipeline import BlockState, ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.nn import functional as F

from pipelines.blocks.tree import insert_after, replace_blocks

STRENGTH = 0.8
"""Default of diffusers."""
ORIGINAL, MASK, NOISE = "kept_latents", "painted_part", "kept_noise"
"""Latents of the picture, the painted share of each token, and the noise that the job begins with."""

JOINED = "joined_ids"
"""Positions of the result's tokens and of all pictures'."""

WORKFLOW = {"image_conditioned_inpainting": {"image": True, "mask_image": True, "prompt": True}}


class MaskedPictureStep(Flux2VaeEncoderStep):  # type: ignore[misc]  # diffusers has no types
    """Encode the picture in the size of the result, and reduce the mask to tokens."""

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name) for name in ("image", "mask_image", "height", "width", "generator")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in (ORIGINAL, MASK)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        has_mask = block_state.mask_image is not None
        setattr(block_state, ORIGINAL, self._encode_original(components, block_state) if has_mask else None)
        setattr(block_state, MASK, _token_mask(components, block_state) if has_mask else None)
        self.set_block_state(state, block_state)
        return components, state

    def _encode_original(self, components: Any, block_state: BlockState) -> Tensor:
        """Return latents, (1, tokens, channels)."""
        images = block_state.image if isinstance(block_state.image, list) else [block_state.image]
        size = {"height": block_state.height, "width": block_state.width}
        image_BCHW = components.image_processor.preprocess(images[0], **size, resize_mode="crop")
        image_BCHW = image_BCHW.to(components._execution_device, components.vae.dtype)
        return _pack(self._encode_vae_image(components.vae, image_BCHW, block_state.generator))


class MaskedStartStep(ModularPipelineBlocks):  # type: ignore[misc]
    """Begin with the picture under the noise of ``strength``, and skip the steps before."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("scheduler", FlowMatchEulerDiscreteScheduler)]

    @property
    def inputs(self) -> list[InputParam]:
        names = (ORIGINAL, "latents", "timesteps", "num_inference_steps")
        return [InputParam("strength", default=STRENGTH), *map(InputParam, names)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in ("latents", NOISE, "timesteps", "num_inference_steps")]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        setattr(block_state, NOISE, block_state.latents)
        original = getattr(block_state, ORIGINAL)
        if original is not None:
            scheduler, num_steps = components.scheduler, block_state.num_inference_steps
            first = int(max(num_steps - min(num_steps * block_state.strength, num_steps), 0))
            scheduler.set_begin_index(first)
            block_state.timesteps = scheduler.timesteps[first:]
            block_state.num_inference_steps = num_steps - first
            block_state.latents = scheduler.scale_noise(original, block_state.timesteps[:1], block_state.latents)
        self.set_block_state(state, block_state)
        return components, state


class KeepOutsideStep(ModularPipelineBlocks):  # type: ignore[misc]
    """Restore the picture outside the mask, under the noise that the next step expects."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("scheduler", FlowMatchEulerDiscreteScheduler)]

    @property
    def inputs(self) -> list[InputParam]:
        return list(map(InputParam, (ORIGINAL, MASK, NOISE, "latents", "timesteps")))

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents")]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        mask = getattr(block_state, MASK)
        if mask is not None:
            original = getattr(block_state, ORIGINAL)
            if i + 1 < len(block_state.timesteps):
                after = block_state.timesteps[i + 1 : i + 2]
                original = components.scheduler.scale_noise(original, after, getattr(block_state, NOISE))
            block_state.latents = (1 - mask) * original + mask * block_state.latents
        return components, block_state


class JoinedTransformer:
    """Stands for ``transformer``, whose calls get the positions ``ids_BLP`` of all tokens."""

    def __init__(self, transformer: Any, ids_BLP: Tensor) -> None:
        self._transformer, self._ids_BLP = transformer, ids_BLP

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)

    def __call__(self, **call: Any) -> Any:
        return self._transformer(**{**call, "img_ids": self._ids_BLP})


class JoinOnce:
    """Mixin for a loop block that joins positions of result and pictures at each step.

    Steps get the same tensor, or an engine would compute anew what it hoists.
    """

    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        own = components
        if getattr(block_state, "image_latents", None) is not None:
            if getattr(block_state, JOINED, None) is None:
                joined_BLP = torch.cat((block_state.latent_ids, block_state.image_latent_ids), dim=1)
                setattr(block_state, JOINED, joined_BLP)
            own = copy.copy(components)
            own.transformer = JoinedTransformer(components.transformer, getattr(block_state, JOINED))
        _, block_state = super().__call__(own, block_state, i=i, t=t)  # type: ignore[misc]
        return components, block_state


class DevDenoiser(JoinOnce, Flux2LoopDenoiser):  # type: ignore[misc]
    """The block of FLUX.2 [dev]."""


class KleinDenoiser(JoinOnce, Flux2KleinLoopDenoiser):  # type: ignore[misc]
    """The block of a distilled klein."""


class KleinBaseDenoiser(JoinOnce, Flux2KleinBaseLoopDenoiser):  # type: ignore[misc]
    """The block of klein with guidance."""


def patch_blocks(blocks: Any) -> None:
    for ours in (DevDenoiser, KleinDenoiser, KleinBaseDenoiser):
        replace_blocks(blocks, ours.__bases__[1], ours)
    if not isinstance(blocks, Flux2KleinAutoBlocks | Flux2KleinBaseAutoBlocks):
        return
    blocks._workflow_map = {**blocks._workflow_map, **WORKFLOW}
    insert_after(blocks, Flux2VaeEncoderStep, "masked_picture", MaskedPictureStep)
    insert_after(blocks, Flux2SetTimestepsStep, "masked_start", MaskedStartStep)
    insert_after(blocks, Flux2LoopAfterDenoiser, "keep_outside", KeepOutsideStep)


def _pack(x_BCHW: Tensor) -> Tensor:
    packed: Tensor = Flux2PrepareLatentsStep._pack_latents(x_BCHW)
    return packed


def _token_mask(components: Any, block_state: BlockState) -> Tensor:
    """Return the painted share of each token, (1, tokens, 1)."""
    token = components.vae_scale_factor * 2
    size = {"height": block_state.height, "width": block_state.width}
    processor = VaeImageProcessor(
        vae_scale_factor=token, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    mask_B1HW = processor.preprocess(block_state.mask_image, **size, resize_mode="crop")
    tokens = (block_state.height // token, block_state.width // token)
    mask_B1HW = F.interpolate(mask_B1HW, size=tokens, mode="bilinear")
    return _pack(mask_B1HW.to(components._execution_device, components.vae.dtype))
