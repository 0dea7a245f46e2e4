"""Blocks of MiniMax-H3 that write into what others keep, or use tensors of the device to index those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopSchedulerStep
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState

from pipelines.blocks.tree import replace_blocks

TAGS, ROWS = ("text_token_tags",), ("video_indices", "audio_indices")


class StepOnCopy(MiniMaxH3LoopSchedulerStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that writes into the latents: whoever kept them would find them changed."""

    def __call__(self, components: Any, block_state: BlockState, **step: Any) -> Any:
        for name in ("latents", "audio_latents"):
            setattr(block_state, name, getattr(block_state, name).clone())
        return super().__call__(components, block_state, **step)


class LayoutOnCpu(MiniMaxH3PrepareLayoutStep):  # type: ignore[misc]
    """Takes the place of a block that writes the prompt's tags, which are on the device, into a tensor of the CPU."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        with _on_cpu(state, TAGS):
            return super().__call__(components, state)


class TimestepsOnCpu(MiniMaxH3SetTimestepsStep):  # type: ignore[misc]
    """Takes the place of a block that indexes a tensor of the CPU by rows that are on the device."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        with _on_cpu(state, ROWS):
            return super().__call__(components, state)


@contextmanager
def _on_cpu(state: PipelineState, names: tuple[str, ...]) -> Iterator[None]:
    """Within it these values of ``state`` are on the CPU."""
    values = {name: state.get(name) for name in names}
    for name, value in values.items():
        state.set(name, value.cpu())
    yield
    for name, value in values.items():
        state.set(name, value)


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, MiniMaxH3PrepareLayoutStep, LayoutOnCpu)
    replace_blocks(blocks, MiniMaxH3SetTimestepsStep, TimestepsOnCpu)
    replace_blocks(blocks, MiniMaxH3LoopSchedulerStep, StepOnCopy)
