"""Blocks of Wan Animate 2 in place of diffusers' loop over segments, whose passes over the transformer are one block.

Here a step of the loop is a step of the solver, in whichever segment. Three processes share what that loop does: the
encoder encodes the driving clip, all segments at once; the decoder decodes the result. In between, a rank decodes the
end of a segment and encodes it again for the next one, which continues its pixels. The arithmetic is diffusers' own.
"""

from __future__ import annotations

from types import SimpleNamespace
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
)
from diffusers.modular_pipelines.wan_animate_2.encoders import (
    WanAnimate2ProcessImagesInputStep,
    WanAnimate2ProcessVideosInputStep,
    WanAnimate2VideoClipEncoderStep,
    clip_visual_encode,
    encode_vae,
    get_i2v_mask,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from pipelines.blocks.tree import block_at, replace_blocks
from pipelines.models.wan_animate2.call import (
    CONDITION,
    DRIVING,
    DRIVING_PICTURE,
    DRIVING_TEXT,
    DRIVING_VIDEO,
    FINISHED,
    NEGATIVE,
    PICTURE,
    REFERENCE,
    num_latent_frames,
)
from pipelines.vae.chunks import decode_chunks, decode_segments

MODEL = "wan-animate-2"
LATENTS, STEPS = "latents", "segment_steps"
EMBEDS, NEGATIVE_EMBEDS = "prompt_embeds", "negative_prompt_embeds"
CONSTANTS = (CONDITION, DRIVING, DRIVING_TEXT, DRIVING_PICTURE, PICTURE, EMBEDS, NEGATIVE_EMBEDS)
"""Values of the loop that no step of a segment changes: the same tensors in every call."""
ON_CPU = torch.device("cpu")


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


class ClipOnHost(WanAnimate2ProcessVideosInputStep):  # type: ignore[misc]
    """Replaces a block that puts the whole clip on the device: 6 GB for 40 s of 640 x 800 pixels."""

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        super().__call__(SimpleNamespace(_execution_device=ON_CPU, video_processor=components.video_processor), state)
        return components, state


class DrivingPictureEncoder(WanAnimate2VideoClipEncoderStep):  # type: ignore[misc]
    """Replaces the block that reads the first frame of that clip, which is not on the device."""

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values, device, encoder = self.get_block_state(state), components._execution_device, components.image_encoder
        first_CHW = values.driving_video_pixels[0, :, 0].to(device)
        values.condition_clip_context = clip_visual_encode(encoder, first_CHW, device, encoder.dtype)
        self.set_block_state(state, values)
        return components, state


class DrivingClipEncoder(ModularPipelineBlocks):  # type: ignore[misc]
    """Encode the driving clip's segments, and the frames that the first one continues: none."""

    model_name = MODEL

    @property
    def expected_components(self) -> list[ComponentSpec]:
        parts: list[ComponentSpec] = WanAnimate2SegmentVaeEncoderStep().expected_components
        return parts

    @property
    def inputs(self) -> list[InputParam]:
        blocks = (WanAnimate2SegmentVaeEncoderStep(), WanAnimate2SegmentPrevFramesStep())
        named = [param for block in blocks for param in block.inputs]
        return [*{param.name: param for param in named}.values(), InputParam("num_segments", required=True)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name, type_hint=Tensor) for name in (DRIVING_VIDEO, REFERENCE)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values, length = self.get_block_state(state), state.get("segment_frame_length")
        starts = [k * values.effective_segment for k in range(values.num_segments)]
        pixels = (values.driving_video_pixels[:, :, start : start + length] for start in starts)
        encoded = [encode_vae(components.vae, one.to(components._execution_device)) for one in pixels]
        values.driving_video_latents = torch.cat(encoded)
        WanAnimate2SegmentPrevFramesStep()(components, values, k=0)
        self.set_block_state(state, values)
        return components, state


class PrepareSegment(ModularPipelineBlocks):  # type: ignore[misc]
    """Begin the first segment, and cast what no step changes to the transformer's dtype."""

    model_name = MODEL

    @property
    def expected_components(self) -> list[ComponentSpec]:
        blocks = (WanAnimate2SegmentPrepareStep(), WanAnimate2SegmentSchedulerResetStep())
        vae = WanAnimate2SegmentVaeEncoderStep().expected_components
        return [*vae, *(part for block in blocks for part in block.expected_components)]

    @property
    def inputs(self) -> list[InputParam]:
        names = (REFERENCE, DRIVING_VIDEO, "prompt_ref_embeds", "condition_clip_context", EMBEDS)
        return [
            InputParam.template("generator"),
            InputParam.template("num_inference_steps"),
            InputParam(NEGATIVE_EMBEDS),
            InputParam(PICTURE, required=True),
            *(InputParam(name, required=True) for name in names),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name, type_hint=Tensor) for name in (LATENTS, "timesteps", STEPS, FINISHED, *CONSTANTS)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        values, dtype = self.get_block_state(state), components.transformer.dtype
        values.segment_steps, values.finished_segments = values.num_inference_steps, []
        begin_segment(components, values, 0)
        values.timesteps = components.scheduler.timesteps
        values.driving_text = values.prompt_ref_embeds.to(dtype)
        values.driving_picture = values.condition_clip_context.to(dtype)
        for name in (PICTURE, EMBEDS, NEGATIVE_EMBEDS):
            value = getattr(values, name)
            setattr(values, name, None if value is None else value.to(dtype))
        self.set_block_state(state, values)
        return components, state


def begin_segment(components: Any, values: BlockState, number: int) -> None:
    """Draw the noise of a segment, begin its schedule, and set the conditions that its steps share."""
    device, dtype = components._execution_device, components.transformer.dtype
    shape = (components.num_channels_latents, *values.reference_latents.shape[1:])
    values.latents = randn_tensor(shape, generator=values.generator, device=device, dtype=torch.float32)
    components.scheduler.set_timesteps(values.segment_steps, device=device)
    values.condition_latents = values.reference_latents[None].to(dtype)
    driving_CFHW = values.driving_video_latents[number]
    sizes, factor = driving_CFHW.shape[1:], components.vae_scale_factor_temporal
    mask_CFHW = get_i2v_mask(*sizes, 1 + factor * (sizes[0] - 1), device=device)
    parts = (driving_CFHW, mask_CFHW.to(driving_CFHW.dtype), driving_CFHW)
    values.driving_hidden_states = torch.cat(parts)[None].to(dtype)


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
        return [*(InputParam(name, required=True) for name in needed), InputParam(NEGATIVE_EMBEDS)]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, k: int, i: int, t: Tensor) -> tuple[Any, BlockState]:
        guider, transformer = components.guider, components.transformer
        by_branch = {
            "encoder_hidden_states": (block_state.prompt_embeds, block_state.negative_prompt_embeds),
            NEGATIVE: (False, True),
        }
        guider.set_state(step=i, num_inference_steps=len(block_state.timesteps), timestep=t)
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
    def __call__(self, components: Any, block_state: BlockState, k: int, i: int, t: Tensor) -> tuple[Any, BlockState]:
        batch = (block_state.noise_pred[None], t, block_state.latents[None])
        stepped = components.scheduler.step(*batch, return_dict=False, generator=block_state.generator)[0]
        block_state.latents = stepped[0]
        return components, block_state


class NextSegment(ModularPipelineBlocks):  # type: ignore[misc]
    """After the last step of a segment, begin the one that continues it."""

    model_name = MODEL

    @property
    def expected_components(self) -> list[ComponentSpec]:
        parts: list[ComponentSpec] = PrepareSegment().expected_components
        return parts

    @property
    def inputs(self) -> list[InputParam]:
        own = [param for param in WanAnimate2SegmentPrevFramesStep().inputs if param.name != "reference_image_latents"]
        needed = (LATENTS, REFERENCE, DRIVING_VIDEO, FINISHED, STEPS)
        return [InputParam.template("generator"), *(InputParam(name, required=True) for name in needed), *own]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name, type_hint=Tensor) for name in (LATENTS, FINISHED)]

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, k: int, i: int, t: Tensor) -> tuple[Any, BlockState]:
        number = k + 1
        if i + 1 < len(block_state.timesteps) or number == len(block_state.driving_video_latents):
            return components, block_state
        vae, device = components.rank_part("vae"), components._execution_device
        spatial = components.vae_scale_factor_spatial
        block_state.finished_segments = [*block_state.finished_segments, block_state.latents]
        block_state.out_frames = last_frames(vae, block_state.latents)
        block_state.reference_image_latents = block_state.reference_latents[:, :1]
        parts = SimpleNamespace(vae=vae, _execution_device=device, vae_scale_factor_spatial=spatial)
        WanAnimate2SegmentPrevFramesStep()(parts, block_state, k=number)
        block_state.out_frames = None
        begin_segment(components, block_state, number)
        return components, block_state


def last_frames(vae: Any, latents_CFHW: Tensor) -> Tensor:
    """Return the frames of a segment's last latent frame, ``pixels_BCFHW``. The others are not kept."""
    *_, last_BCFHW = decode_chunks(vae, to_decode(vae, latents_CFHW[None, :, 1:]))
    return last_BCFHW


def to_decode(vae: Any, latents_BCFHW: Tensor) -> Tensor:
    """Return latents at the scale of the auto-encoder, as diffusers' ``decode_vae`` does."""
    latents_BCFHW = latents_BCFHW.to(vae.dtype)
    mean_BCFHW, std_BCFHW = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(latents_BCFHW.device, latents_BCFHW.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents_BCFHW / (1.0 / std_BCFHW) + mean_BCFHW


class SegmentLoop(LoopSequentialPipelineBlocks):  # type: ignore[misc]
    """The steps of all segments."""

    model_name = MODEL
    block_classes = [SegmentDenoiser, SolverStep, NextSegment]  # noqa: RUF012  diffusers' form
    block_names = ["denoiser", "update", "next_segment"]  # noqa: RUF012

    @property
    def loop_inputs(self) -> list[InputParam]:
        return [InputParam("timesteps", required=True)]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        for k in range(len(block_state.driving_video_latents)):
            for i, t in enumerate(block_state.timesteps):
                components, block_state = self.loop_step(components, block_state, k=k, i=i, t=t)
        self.set_block_state(state, block_state)
        return components, state


class DistilledSegmentLoop(SegmentLoop):
    block_classes = [DistilledSegmentDenoiser, SolverStep, NextSegment]  # noqa: RUF012


class CoreDenoise(SequentialPipelineBlocks):  # type: ignore[misc]
    """Preparation and steps of all segments."""

    model_name = MODEL
    block_classes = [PrepareSegment, SegmentLoop]  # noqa: RUF012
    block_names = ["prepare", "denoise"]  # noqa: RUF012


class DistilledCoreDenoise(CoreDenoise):
    block_classes = [PrepareSegment, DistilledSegmentLoop]  # noqa: RUF012


class DecodeSegments(WanAnimate2DecodeStep):  # type: ignore[misc]
    """Decode all segments. The first latent frame of each is the picture's and no part of the clip.

    Frames beyond the end of the clip are not decoded: each depends on earlier ones only.
    """

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [*super().expected_components, *WanAnimate2SegmentVaeEncoderStep().expected_components]

    @property
    def inputs(self) -> list[InputParam]:
        own = [param for param in super().inputs if param.name != "segment_frames"]
        return [*(InputParam(name, required=True) for name in (LATENTS, FINISHED)), *own]

    @torch.no_grad()
    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        vae, num_frames = components.vae, state.get("real_frame_len")
        finished, last_CFHW = state.get(FINISHED), state.get(LATENTS)[:, 1:]
        left = num_frames - sum(self._num_own(components, one) for one in finished)
        last_CFHW = last_CFHW[:, : num_latent_frames(left, components.vae_scale_factor_temporal)]
        segments = [*(one[:, 1:].to(last_CFHW) for one in finished), last_CFHW]
        latents_BCFHW = to_decode(vae, torch.cat(segments, dim=1)[None])
        pixels_BCFHW = decode_segments(vae, latents_BCFHW, [one.shape[1] for one in segments])
        top, left, height, width = state.get("crop_region")
        pixels_BCFHW = pixels_BCFHW[:, :, :num_frames, top : top + height, left : left + width]
        postprocess = components.video_processor.postprocess_video
        state.set("videos", postprocess(pixels_BCFHW, output_type=state.get("output_type")))
        return components, state

    @staticmethod
    def _num_own(components: Any, latents_CFHW: Tensor) -> int:
        """Return the frames up to the one that the next segment begins with."""
        num_frames: int = components.vae_scale_factor_temporal * (latents_CFHW.shape[1] - 2)
        return num_frames


def patch_blocks(blocks: Any) -> None:
    """Replace the loop over segments, and move its encoding and decoding out of it."""
    loop = block_at(blocks, ("denoise", "denoise"))
    is_distilled = WanAnimate2DistilledSegmentDenoiseInner in map(type, loop.sub_blocks.values())
    replace_blocks(blocks, WanAnimate2ProcessImagesInputStep, KeepPictureSize)
    replace_blocks(blocks, WanAnimate2ProcessVideosInputStep, ClipOnHost)
    replace_blocks(blocks, WanAnimate2VideoClipEncoderStep, DrivingPictureEncoder)
    names = list(blocks.sub_blocks)
    blocks.sub_blocks.insert("driving_encoder", DrivingClipEncoder(), names.index("denoise"))
    blocks.sub_blocks["denoise"] = DistilledCoreDenoise() if is_distilled else CoreDenoise()
    blocks.sub_blocks["decode"] = DecodeSegments()
