"""The language model that rewrites a prompt before it is encoded is a part that a folder may lack."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.flux3.prompt_upsampler import Flux3AutoPromptUpsampleStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from pipelines.blocks.tree import replace_blocks


class RewrittenIfCan(Flux3AutoPromptUpsampleStep):  # type: ignore[misc]  # diffusers has no types
    """In place of a block that fails without that model: then the prompt stays as it is."""

    def __call__(self, pipeline: Any, state: PipelineState) -> Any:
        if getattr(pipeline, "prompt_upsampler", None) is None:
            return pipeline, state
        return super().__call__(pipeline, state)


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, Flux3AutoPromptUpsampleStep, RewrittenIfCan)
