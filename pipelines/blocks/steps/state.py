"""Where a job is in its loop: a value, which can be kept, sent, and gone on with anywhere."""

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
    """A job before its step number ``step``. ``values`` are the pipeline's, as they were when the loop began;
    ``loop_state`` is the loop's own, ``parts`` are the job's own schedulers and guiders.

    ``loop`` and ``left`` are where the loop is among the blocks, and what comes after it on a rank. ``steps`` are what
    each step's blocks are called with. ``negative`` replaces values of the loop's for a second prompt.
    ``computed`` says which steps make forwards; ``kept`` is what the next one takes instead, if it makes none.

    Where each round of the loop takes several steps (``is_over_rounds``, see ``passes``), ``loop_state`` and ``parts``
    are those before the round, and ``answers`` are what the transformer answered in it, each as large as latents.
    """

    request: MediaRequest
    values: PipelineState
    loop_state: BlockState
    parts: Mapping[str, Any]
    loop: tree.Path
    left: tuple[tree.Path, ...]
    steps: Steps
    step: int = 0
    negative: Mapping[str, Any] | None = None
    computed: tuple[bool, ...]
    kept: KeptPredictions | None = None
    is_over_rounds: bool = False
    answers: tuple[Any, ...] = ()

    @property
    def ends_round(self) -> bool:
        """Whether the step after this one is not of the same round of the loop."""
        after = self.step + 1
        return after == len(self.steps) or self.steps[after] != self.steps[self.step]
