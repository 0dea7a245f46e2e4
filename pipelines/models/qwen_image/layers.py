"""The picture that is taken apart into layers: with opacity, and in the size of the request."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from diffusers.modular_pipelines.qwenimage.encoders import QwenImageLayeredResizeStep

from pipelines.blocks.tree import replace_blocks


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


def mend(blocks: Any) -> None:
    replace_blocks(blocks, QwenImageLayeredResizeStep, WithOpacity)
