"""The picture that a clip begins with as diffusers' blocks should pass it on."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.hunyuan_video1_5.before_denoise import HunyuanVideo15PrepareLatentsStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam

from pipelines.blocks.tree import replace_blocks

SEEN = "image_embeds"


class LatentsBesidePicture(HunyuanVideo15PrepareLatentsStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that puts zeros where an encoder has put what it sees in the picture."""

    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam(SEEN)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        seen = state.get(SEEN)
        super().__call__(components, state)
        if seen is not None:
            state.set(SEEN, seen)
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, HunyuanVideo15PrepareLatentsStep, LatentsBesidePicture)
