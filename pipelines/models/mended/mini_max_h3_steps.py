"""A step that leaves the latents of the one before it as they were."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopSchedulerStep
from diffusers.modular_pipelines.modular_pipeline import BlockState

from pipelines.blocks.tree import replace_blocks


class StepOnCopy(MiniMaxH3LoopSchedulerStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that writes into the latents: whoever kept them would find them changed."""

    def __call__(self, components: Any, block_state: BlockState, **step: Any) -> Any:
        for name in ("latents", "audio_latents"):
            setattr(block_state, name, getattr(block_state, name).clone())
        return super().__call__(components, block_state, **step)


def mend(blocks: Any) -> None:
    replace_blocks(blocks, MiniMaxH3LoopSchedulerStep, StepOnCopy)
