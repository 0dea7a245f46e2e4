"""A patch of Ideogram 4's blocks: the text's padding, which no token attends to, ends at the encoder."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.ideogram4.encoders import Ideogram4TextEncoderStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from pipelines.blocks.tree import replace_blocks

FEATURES, LENGTHS = "text_features", "text_lengths"


class UnpaddedText(Ideogram4TextEncoderStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that pads every prompt to 2048 tokens, on the left: its features take 436 MB in float32."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        components, state = super().__call__(components, state)
        state.set(FEATURES, state.get(FEATURES)[:, -max(state.get(LENGTHS)) :].contiguous())
        return components, state


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, Ideogram4TextEncoderStep, UnpaddedText)
