"""The last frame of a clip as diffusers' blocks should take it."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.wan.encoders import WanImageCropResizeStep

from pipelines.blocks.tree import replace_blocks


class LastFrameAsItIs(WanImageCropResizeStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that cuts the last frame with width and height exchanged: it has the right size."""

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        block_state.resized_last_image = block_state.last_image
        self.set_block_state(state, block_state)
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, WanImageCropResizeStep, LastFrameAsItIs)
