"""Blocks of Wan Animate 2 for clips of one segment, in place of diffusers' loop over segments.

That loop encodes and decodes inside, because each segment continues the pixels of the one before. A clip of one
segment needs neither: the encoder process encodes the driving clip, and the decoder process decodes the result. The
arithmetic is that of diffusers' blocks for its first segment.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from diffusers.modular_pipelines.wan_animate_2.decoders import WanAnimate2DecodeStep
from diffusers.modular_pipelines.wan_animate_2.denoise import (
    WanAnimate2DistilledSegmentDenoiseInner,
    WanAnimate2SegmentDenoiseInner,
    WanAnimate2SegmentPrepareStep,
    WanAnimate2SegmentPrevFramesStep,
    WanAnimate2SegmentSchedulerResetStep,
    WanAnimate2SegmentVaeEncoderStep,
    decode_vae,
)
from diffusers.modular_pipelines.wan_animate_2.encoders import WanAnimate2ProcessImagesInputStep
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from pipelines.blocks.tree import block_at, replace_blocks
from pipelines.models.wan_animate2.call import CONDITION, DRIVING, DRIVING_PICTURE, DRIVING_TEXT, NEGATIVE, PICTURE

MODEL = "wan-animate-2"
LATENTS = "latents"
EMBEDS, NEGATIVE_EMBEDS = "prompt_embeds", "negative_prompt_embeds"
DRIVING_VALUES = ("driving_video_latents", "driving_video_condition")
CONSTANTS = (CONDITION, DRIVING, DRIVING_TEXT, DRIVING_PICTURE, PICTURE, EMBEDS, NEGATIVE_EMBEDS)
"""Values of the loop that no step changes: the same tensors in every call of a job."""


class KeepPictureSize(WanAnimate2ProcessImagesInputStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that derives the size from the area and the picture, which has the request's size already.

    Its arithmetic may round a side down to the next multiple.
    """

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values = self.get_block_state(state)
        values.crop_region = (0, 0, values.height, values.width)
        pixels_BCHW = components.image_processor.preprocess(
            values.image, height=values.height, width=values.width, resize_mode="fill"
        )
        values.image_pixels = pixels_BCHW.to(components._execution_device, dtype=torch.float32)
        self.set_block_state(state, values)
        return components, state


class DrivingClipEncoder(ModularPipelineBlocks):  # type: ignore[misc]
    """Encode the driving clip, and the frames that the first segment continues: none."""

    model_name = MODEL

    @property
    def expected_components(self) -> list[ComponentSpec]:
        parts: list[ComponentSpec] = WanAnimate2SegmentVaeEncoderStep().expected_components
        return parts

    @property
    def inputs(self) -> list[InputParam]:
        named = (*WanAnimate2SegmentVaeEncoderStep().inputs, *WanAnimate2SegmentPrevFramesStep().inputs)
        return [*{param.name: param for param in named}.values()]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        names = (*DRIVING_VALUES, "reference_latents")
        return [OutputParam(name, type_hint=Tensor) for name in names]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values = self.get_block_state(state)
        for block in (WanAnimate2SegmentVaeEncoderStep(), WanAnimate2SegmentPrevFramesStep()):
            block(components, values, k=0)
        self.set_block_state(state, values)
        return components, state


class PrepareSegment(ModularPipelineBlocks):  # type: ignore[misc]
    """Draw the noise, make the schedule, and cast what no step changes to the transformer's dtype."""

    model_name = MODEL

    @property
    def expected_components(self) -> list[ComponentSpec]:
        blocks = (WanAnimate2SegmentPrepareStep(), WanAnimate2SegmentSchedulerResetStep())
        vae = WanAnimate2SegmentVaeEncoderStep().expected_components
        return [*vae, *(part for block in blocks for part in block.expected_components)]

    @property
    def inputs(self) -> list[InputParam]:
        names = ("reference_latents", *DRIVING_VALUES, "prompt_ref_embeds", "condition_clip_context", EMBEDS)
        return [
            InputParam.template("generator"),
            InputParam.template("num_inference_steps"),
            InputParam(NEGATIVE_EMBEDS),
            InputParam(PICTURE, required=True),
            *(InputParam(name, required=True) for name in names),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name, type_hint=Tensor) for name in (LATENTS, "timesteps", *CONSTANTS)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values, dtype = self.get_block_state(state), components.transformer.dtype
        shape = (components.num_channels_latents, *values.reference_latents.shape[1:])
        values.latents = randn_tensor(
            shape, generator=values.generator, device=components._execution_device, dtype=torch.float32
        )
        WanAnimate2SegmentSchedulerResetStep()(components, values, k=0)
        values.condition_latents = values.reference_latents[None].to(dtype)
        driving = (values.driving_video_latents[0], values.driving_video_condition)
        values.driving_hidden_states = torch.cat(driving)[None].to(dtype)
        values.driving_text = values.prompt_ref_embeds.to(dtype)
        values.driving_picture = values.condition_clip_context.to(dtype)
        for name in (PICTURE, EMBEDS, NEGATIVE_EMBEDS):
            value = getattr(values, name)
            setattr(values, name, None if value is None else value.to(dtype))
        self.set_block_state(state, values)
        return components, state


class SegmentDenoiser(ModularPipelineBlocks):  # type: ignore[misc]
    """Call the transformer for each branch of guidance."""

    model_name = MODEL
    inner: type[Any] = WanAnimate2SegmentDenoiseInner
    """Diffusers' block of the same purpose, whose guider this has."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        parts: list[ComponentSpec] = self.inner().expected_components
        return parts

    @property
    def inputs(self) -> list[InputParam]:
        needed = (LATENTS, CONDITION, DRIVING, DRIVING_TEXT, DRIVING_PICTURE, PICTURE, EMBEDS)
        return [
            *(InputParam(name, required=True) for name in needed),
            InputParam(NEGATIVE_EMBEDS),
            InputParam.template("num_inference_steps"),
        ]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        guider, transformer = components.guider, components.transformer
        by_branch = {
            "encoder_hidden_states": (block_state.prompt_embeds, block_state.negative_prompt_embeds),
            NEGATIVE: (False, True),
        }
        guider.set_state(step=i, num_inference_steps=block_state.num_inference_steps, timestep=t)
        branches = guider.prepare_inputs(by_branch)
        shared = {name: getattr(block_state, name) for name in CONSTANTS if name not in (EMBEDS, NEGATIVE_EMBEDS)}
        for branch in branches:
            guider.prepare_models(transformer)
            branch.noise_pred = transformer(
                hidden_states=block_state.latents[None].to(transformer.dtype),
                timestep=t[None].float(),
                encoder_hidden_states=branch.encoder_hidden_states,
                is_uncondtion=branch.is_uncondtion,
                **shared,
                return_dict=False,
            )[0][0]
            guider.cleanup_models(transformer)
        block_state.noise_pred = guider(branches)[0]
        return components, block_state


class DistilledSegmentDenoiser(SegmentDenoiser):
    """Call the transformer once: the guider is off unless a request says otherwise."""

    inner = WanAnimate2DistilledSegmentDenoiseInner


class SolverStep(ModularPipelineBlocks):  # type: ignore[misc]
    """Take a step of the solver."""

    model_name = MODEL

    @property
    def expected_components(self) -> list[ComponentSpec]:
        parts: list[ComponentSpec] = WanAnimate2SegmentSchedulerResetStep().expected_components
        return parts

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam.template("generator")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(LATENTS, type_hint=Tensor)]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: Tensor) -> tuple[Any, BlockState]:
        batch = (block_state.noise_pred[None], t, block_state.latents[None])
        stepped = components.scheduler.step(*batch, return_dict=False, generator=block_state.generator)[0]
        block_state.latents = stepped[0]
        return components, block_state


class SegmentLoop(LoopSequentialPipelineBlocks):  # type: ignore[misc]
    """The steps of a segment."""

    model_name = MODEL
    block_classes = [SegmentDenoiser, SolverStep]  # noqa: RUF012  diffusers' form
    block_names = ["denoiser", "update"]  # noqa: RUF012

    @property
    def loop_inputs(self) -> list[InputParam]:
        return [InputParam("timesteps", required=True)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        for i, t in enumerate(block_state.timesteps):
            components, block_state = self.loop_step(components, block_state, i=i, t=t)
        self.set_block_state(state, block_state)
        return components, state


class DistilledSegmentLoop(SegmentLoop):
    block_classes = [DistilledSegmentDenoiser, SolverStep]  # noqa: RUF012


class CoreDenoise(SequentialPipelineBlocks):  # type: ignore[misc]
    """Preparation and steps of a segment."""

    model_name = MODEL
    block_classes = [PrepareSegment, SegmentLoop]  # noqa: RUF012
    block_names = ["prepare", "denoise"]  # noqa: RUF012


class DistilledCoreDenoise(CoreDenoise):
    block_classes = [PrepareSegment, DistilledSegmentLoop]  # noqa: RUF012


class DecodeSegment(WanAnimate2DecodeStep):  # type: ignore[misc]
    """Decode the segment, whose first latent frame is the picture's and no part of the clip."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [*super().expected_components, *WanAnimate2SegmentVaeEncoderStep().expected_components]

    @property
    def inputs(self) -> list[InputParam]:
        own = [param for param in super().inputs if param.name != "segment_frames"]
        return [InputParam(LATENTS, required=True), *own]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        pixels_BCFHW = decode_vae(components.vae, state.get(LATENTS)[:, 1:])
        top, left, height, width = state.get("crop_region")
        pixels_BCFHW = pixels_BCFHW[:, :, : state.get("real_frame_len"), top : top + height, left : left + width]
        postprocess = components.video_processor.postprocess_video
        state.set("videos", postprocess(pixels_BCFHW, output_type=state.get("output_type")))
        return components, state


def patch_blocks(blocks: Any) -> None:
    """Replace the loop over segments, and move its encoding and decoding out of it."""
    loop = block_at(blocks, ("denoise", "denoise"))
    is_distilled = WanAnimate2DistilledSegmentDenoiseInner in map(type, loop.sub_blocks.values())
    replace_blocks(blocks, WanAnimate2ProcessImagesInputStep, KeepPictureSize)
    names = list(blocks.sub_blocks)
    blocks.sub_blocks.insert("driving_encoder", DrivingClipEncoder(), names.index("denoise"))
    blocks.sub_blocks["denoise"] = DistilledCoreDenoise() if is_distilled else CoreDenoise()
    blocks.sub_blocks["decode"] = DecodeSegment()
