"""Patches of MiniMax-H3's blocks that write into shared tensors, or mix tensors of device and CPU; its attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
)
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopSchedulerStep
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VAReferenceEncoderStep
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState
from torch import Tensor, nn

from engines.fast.records import RotaryTables
from pipelines.blocks import attention
from pipelines.blocks.tree import replace_blocks
from pipelines.models.mini_max_h3.references import WITH_SOUND, kind_of

TAGS, ROWS = ("text_token_tags",), ("video_indices", "audio_indices")
KINDS = "normalized_references"
"""References, of which ranks get the kinds alone: they have no use for pixels."""


class StepOnCopy(MiniMaxH3LoopSchedulerStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that changes the latents in place, which others may still hold."""

    def __call__(self, components: Any, block_state: BlockState, **step: Any) -> Any:
        for name in ("latents", "audio_latents"):
            setattr(block_state, name, getattr(block_state, name).clone())
        return super().__call__(components, block_state, **step)


class LayoutOnCpu(MiniMaxH3PrepareLayoutStep):  # type: ignore[misc]
    """Replaces a block that writes the prompt's tags, on the device, into a CPU tensor."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        with _on_cpu(state, TAGS):
            return super().__call__(components, state)


class ReferencesEncoded(MiniMaxH3Ref2VAReferenceEncoderStep):  # type: ignore[misc]
    """Replaces a block after which references still travel with their pixels."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        result = super().__call__(components, state)
        state.set(KINDS, [kind_of(one.kind, has_sound=one.has_audio) for one in state.get(KINDS)])
        return result


class ReferencesLayout(MiniMaxH3Ref2VAPrepareLayoutStep):  # type: ignore[misc]
    """Replaces a block that writes the prompt's tags, on the device, into a CPU tensor. It takes kinds alone."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        state.set(KINDS, list(map(_reference, state.get(KINDS))))
        with _on_cpu(state, TAGS):
            return super().__call__(components, state)


class TimestepsOnCpu(MiniMaxH3SetTimestepsStep):  # type: ignore[misc]
    """Replaces a block that indexes a CPU tensor by rows on the device."""

    def __call__(self, components: Any, state: PipelineState) -> Any:
        with _on_cpu(state, ROWS):
            return super().__call__(components, state)


def _reference(name: str) -> Any:
    """Return what the layout reads of a reference, by the ``name`` that ``kind_of`` returned."""
    return SimpleNamespace(kind=name.removesuffix(WITH_SOUND), has_audio=name.endswith(WITH_SOUND))


@contextmanager
def _on_cpu(state: PipelineState, names: tuple[str, ...]) -> Iterator[None]:
    """Move these values of ``state`` to the CPU, inside this context."""
    values = {name: state.get(name) for name in names}
    for name, value in values.items():
        state.set(name, value.cpu())
    yield
    for name, value in values.items():
        state.set(name, value)


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, MiniMaxH3PrepareLayoutStep, LayoutOnCpu)
    replace_blocks(blocks, MiniMaxH3Ref2VAPrepareLayoutStep, ReferencesLayout)
    replace_blocks(blocks, MiniMaxH3Ref2VAReferenceEncoderStep, ReferencesEncoded)
    replace_blocks(blocks, MiniMaxH3SetTimestepsStep, TimestepsOnCpu)
    replace_blocks(blocks, MiniMaxH3LoopSchedulerStep, StepOnCopy)


class MiniMaxH3FusedProcessor(MiniMaxH3AttnProcessor):  # type: ignore[misc]
    """Normalises and rotates queries and keys in one pass over them, where that is possible."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend. The names are those of diffusers; ``rotary_emb`` has every value twice, (L, rotated features)."""
        processor: Any = self
        if rotary_emb is not None and attention_mask is None and attention.can_rotate(attn, hidden_states):
            cos_1L1P, sin_1L1P = (table_LR[None, :, None, : table_LR.shape[1] // 2] for table_LR in rotary_emb)
            tables, rotary_emb = RotaryTables(cos_1L1P, sin_1L1P, interleaved=False, rounded=True), None
            processor, attn = attention.rotate_and_send(self, attn, hidden_states, tables)
        out_BLC: Tensor = MiniMaxH3AttnProcessor.__call__(processor, attn, hidden_states, rotary_emb, attention_mask)
        return out_BLC


def replace_processors(module: nn.Module) -> None:
    attention.replace_processors(module, {MiniMaxH3AttnProcessor: MiniMaxH3FusedProcessor})
