"""A job's state in its loop: a value that can be stored, sent and resumed anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from engines.core.model import Branch
from engines.parallel.division import shape_of
from pipelines.blocks import tree
from pipelines.blocks.denoiser import guiders_of
from pipelines.blocks.recording_transformer import RecordingTransformer
from pipelines.request import MediaRequest

T = TypeVar("T")
Steps = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPredictions:
    """Predictions of one step that a later step reuses."""

    calls: tuple[Hashable, ...]
    """Shapes of the branches."""
    predictions: tuple[Tensor, ...]
    """One prediction per branch."""

    @classmethod
    def of(cls, branches: tuple[Branch, ...], predictions: tuple[Tensor, ...]) -> Self:
        return cls(calls=tuple(map(shape_of, branches)), predictions=predictions)

    def suit(self, branches: tuple[Branch, ...]) -> bool:
        """Return whether ``branches`` are the same forwards; transformers and guidance may change during a job."""
        return self.calls == tuple(map(shape_of, branches))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterStage:
    """A second pass over a job's latents that has not begun."""

    request: MediaRequest
    """The request of this pass, with its own size and sigmas."""
    conditioning: Any
    """Its ``Conditioning``, on the job's device."""
    noise: NoiseState
    """The generator after the preparation of the first pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksState:
    """A job before its next step."""

    request: MediaRequest
    """The client's request."""
    values: PipelineState
    """The pipeline's values at the start of the loop."""
    loop_state: BlockState
    """The loop's own state; with ``is_over_rounds`` it and ``parts`` are those before the round."""
    parts: Mapping[str, Any]
    """The job's own schedulers and guiders."""
    loop: tree.Path
    """Path of the block with the denoising loop."""
    left: tuple[tree.Path, ...]
    """Blocks after the loop on a rank."""
    steps: Steps
    """Arguments of each step's blocks."""
    step: int = 0
    """Number of the next step."""
    negative: Mapping[str, Any] | None = None
    """Replacements of the loop's values for a second prompt."""
    computed: tuple[bool, ...]
    """True for each step that makes forwards."""
    kept: KeptPredictions | None = None
    """Predictions that the next step reuses, if it makes no forwards."""
    is_over_rounds: bool = False
    """Each round of the loop takes several steps (see ``passes``)."""
    answers: tuple[Any, ...] = ()
    """The transformer's answers in this round, each as large as latents."""
    later: LaterStage | None = None
    """The pass that follows these steps."""
    enlarged: Mapping[str, Tensor] | None = None
    """Latents without noise that a second pass begins with, before its first step."""

    @property
    def ends_round(self) -> bool:
        """True if the next step belongs to another round of the loop."""
        after = self.step + 1
        return after == len(self.steps) or self.steps[after] != self.steps[self.step]


@dataclass(frozen=True, slots=True, eq=False)
class NoiseState:
    """The state of a generator on the CPU."""

    state: Tensor
    """The generator's ``get_state``, uint8."""

    @classmethod
    def of(cls, generator: torch.Generator) -> NoiseState:
        return cls(generator.get_state())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoiseState) and torch.equal(self.state, other.state)

    def generator(self) -> torch.Generator:
        generator = torch.Generator()
        # Hazard: torch reads the bytes in place as a struct. Received bytes may be unaligned: without a copy, the
        # process may die.
        generator.set_state(self.state.clone())
        return generator


def detach_generators(loop_state: BlockState) -> BlockState:
    """Replace the generators in ``loop_state``, also those in dicts (a solver's arguments), by their states.

    One generator in several places becomes one value.
    """
    states: dict[int, NoiseState] = {}
    return _replace_each(torch.Generator, lambda one: states.setdefault(id(one), NoiseState.of(one)), loop_state)


def attach_generators(loop_state: BlockState) -> BlockState:
    """Replace the states in ``loop_state`` by new generators."""
    generators: dict[int, torch.Generator] = {}
    return _replace_each(NoiseState, lambda one: generators.setdefault(id(one), one.generator()), loop_state)


def _replace_each(kind: type, change: Callable[[Any], Any], loop_state: BlockState) -> BlockState:
    """Replace values of ``kind``, also those in dicts, which are copied since they may be shared."""
    for name, value in vars(loop_state).items():
        if isinstance(value, kind):
            setattr(loop_state, name, change(value))
        elif isinstance(value, dict) and any(isinstance(inner, kind) for inner in value.values()):
            changed = {key: change(inner) if isinstance(inner, kind) else inner for key, inner in value.items()}
            setattr(loop_state, name, changed)
    return loop_state


def own_parts(pipeline: Any) -> dict[str, Any]:
    """Return the schedulers and guiders of ``pipeline``."""
    schedulers = [name for name, part in vars(pipeline).items() if "scheduler" in name and part is not None]
    return {name: getattr(pipeline, name) for name in (*schedulers, *guiders_of(pipeline))}


def with_parts(pipeline: Any, parts: Mapping[str, Any]) -> Any:
    """Return a pipeline that shares all with ``pipeline`` except copies of ``parts`` and its recording transformers."""
    own = copy.copy(pipeline)
    for name, part in parts.items():
        setattr(own, name, shallow_copy(part))
    for name, part in vars(pipeline).items():
        if isinstance(part, RecordingTransformer):
            setattr(own, name, copy.copy(part))
    return own


def shallow_copy(value: T) -> T:
    """Return a copy that shares tensors, but not the lists, dicts and schedulers that steps may change in place."""
    own = copy.copy(value)
    for name, inner in vars(value).items():
        if isinstance(inner, list | dict) and not name.startswith("_internal"):
            setattr(own, name, copy.copy(inner))
        elif isinstance(inner, SchedulerMixin):
            setattr(own, name, shallow_copy(inner))
    return own
