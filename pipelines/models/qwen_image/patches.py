"""Patches of diffusers' Qwen-Image blocks: pictures in the size of the request, with opacity where layers are made."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.modular_pipelines.qwenimage.encoders import QwenImageEditResizeStep, QwenImageLayeredResizeStep
from diffusers.modular_pipelines.qwenimage.modular_blocks_qwenimage_edit import QwenImageEditInpaintVaeEncoderStep

from pipelines.blocks.tree import replace_blocks


class SizeAskedFor(QwenImageEditResizeStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that brings the picture to a megapixel, though noise of another size comes to it."""

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


class InSizeAskedFor(QwenImageEditInpaintVaeEncoderStep):  # type: ignore[misc]
    """The text's encoder, which has a block of the same class, sees a megapixel."""

    def __init__(self) -> None:
        super().__init__()
        replace_blocks(self, QwenImageEditResizeStep, SizeAskedFor)


class WithOpacity(QwenImageLayeredResizeStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that knows two sizes, and leaves a picture without opacity to an auto-encoder that
    wants it."""

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
    replace_blocks(blocks, QwenImageLayeredResizeStep, WithOpacity)
    replace_blocks(blocks, QwenImageEditInpaintVaeEncoderStep, InSizeAskedFor)
