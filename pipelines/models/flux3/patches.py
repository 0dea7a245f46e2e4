"""Patch of FLUX.3's blocks: a folder may lack the language model that rewrites prompts."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.flux3.prompt_upsampler import Flux3AutoPromptUpsampleStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from pipelines.blocks.tree import replace_blocks


class OptionalPromptUpsampleStep(Flux3AutoPromptUpsampleStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that fails without that model: the prompt then stays unchanged."""

    def __call__(self, pipeline: Any, state: PipelineState) -> Any:
        if getattr(pipeline, "prompt_upsampler", None) is None:
            return pipeline, state
        return super().__call__(pipeline, state)


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, Flux3AutoPromptUpsampleStep, OptionalPromptUpsampleStep)
