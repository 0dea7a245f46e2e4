"""A job's state in its loop: a value that can be stored, sent and resumed anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState

from pipelines.blocks import tree
from pipelines.blocks.steps.reuse import KeptPredictions
from pipelines.request import MediaRequest

Steps = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksState:
    """A job before its step number ``step``."""

    request: MediaRequest
    values: PipelineState
    """The pipeline's values at the start of the loop."""
    loop_state: BlockState
    """The loop's own state; with ``is_over_rounds`` it and ``parts`` are those before the round."""
    parts: Mapping[str, Any]
    """The job's own schedulers and guiders."""
    loop: tree.Path
    """Path of the loop; ``left`` are the blocks after it on a rank."""
    left: tuple[tree.Path, ...]
    steps: Steps
    """Arguments of each step's blocks."""
    step: int = 0
    negative: Mapping[str, Any] | None = None
    """Replacements of the loop's values for a second prompt."""
    computed: tuple[bool, ...]
    """Whether each step makes forwards."""
    kept: KeptPredictions | None = None
    """Predictions that the next step reuses, if it makes no forwards."""
    is_over_rounds: bool = False
    """Each round of the loop takes several steps (see ``passes``)."""
    answers: tuple[Any, ...] = ()
    """The transformer's answers in this round, each as large as latents."""

    @property
    def ends_round(self) -> bool:
        """True if the next step belongs to another round of the loop."""
        after = self.step + 1
        return after == len(self.steps) or self.steps[after] != self.steps[self.step]
