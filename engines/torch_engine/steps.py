"""One branch over one team by the fastest path: the family's fast model if there is one, captured if configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engines.additions import changed_parameters
from engines.core.layout import TokenLayout
from engines.core.model import (
    MAX_CAPTURED_BYTES,
    MAX_CAPTURED_FLOPS,
    Branch,
    DenoiserModel,
    FastWeights,
    Precision,
    StepTensors,
    max_hoisted_bytes,
)
from engines.core.resources import LRUCache, rank_resources
from engines.core.weight_memory import WeightMemory
from engines.fast.graph import CapturedStep, GraphPool
from engines.parallel.division import shape_of
from engines.parallel.mesh import Team
from engines.parallel.sharded import ShardedModel
from engines.planner.measure import memory_bytes
from engines.planner.profile import rough_flops
from engines.quantization.linear import move_from_host
from engines.torch_engine.config import TorchChoices
from engines.torch_engine.fast_step import FastStep
from engines.torch_engine.hoisted import HoistedCache

logger = logging.getLogger(__name__)

MAX_SHAPES = 32
"""Shapes whose steps and graphs are cached per division of a team; the least recently used is evicted. Ranks that
share one branch agree on its shapes; halves of a team under guidance may differ."""

RUNS_BEFORE_CAPTURE = 1
"""A new shape is served at once, uncaptured; its second step captures, unless it is long (``MAX_CAPTURED_FLOPS``)."""


@dataclass(slots=True)
class _Step:
    """The step for one shape on one team."""

    prepare: Callable[[Branch], StepTensors]
    """Returns the tensors of a branch, which the function reads."""
    function: Callable[[StepTensors], Tensor]
    """Returns the prediction."""
    is_short: bool = True
    """True if it may be captured by its arithmetic (``StepRunner.allows_capture``)."""
    num_runs: int = 0
    """Calls so far."""
    captured: CapturedStep | None = None
    """Its CUDA graph; None: it runs eagerly."""
    has_room: bool = True
    """True if memory for a graph may exist: False after a failure, until another graph is released."""


class StepRunner:
    """Runs branches. All ranks of a team make the same calls in the same order, so they capture at the same moment."""

    def __init__(
        self,
        model: DenoiserModel,
        sharded: ShardedModel,
        *,
        config: TorchChoices,
        device: torch.device,
        weights: Mapping[str, FastWeights] | None = None,
    ) -> None:
        self._model, self._sharded, self._config = model, sharded, config
        self.rules = config.exchange
        """Rules for exchanging heads in steps made from now on."""
        self._device = device
        self._pool: GraphPool | None = None
        """Memory pool of all current graphs."""
        self._hoisted = HoistedCache(
            latents=model.latents,
            timestep=model.timestep,
            hoisted_inputs=model.hoisted_inputs,
            min_entries=model.num_hoisted,
            max_bytes=max_hoisted_bytes(memory_bytes(device)),
        )
        self._memory = rank_resources().get(WeightMemory)
        self._memory.before_sleep(self._hoisted.clear)
        self._weights = dict(weights or {})
        self._steps: dict[Hashable, LRUCache[_Step]] = {}
        """Steps by team and its division, then by shape."""
        self.was_warm = False
        """True if the last run was a replay without a capture or, without capturing, of a shape that had run before."""

    def run(self, branch: Branch, team: Team) -> Tensor:
        """Return the whole prediction, equal on all ranks of the team's context and tensor axes."""
        step = self._step(branch, team)
        tensors = self._laid_out(step.prepare(branch))
        captures = step.captured is None and self._may_capture(step, branch, tensors, team)
        self.was_warm = step.num_runs > 0 and not captures
        if captures:
            step.captured = self._capture(step, tensors, team)
        step.num_runs += 1
        if step.captured is None:
            return step.function(tensors)
        return step.captured(tensors).clone()

    def _laid_out(self, tensors: StepTensors) -> StepTensors:
        """Return ``tensors`` as graphs read them, so that a step before the capture computes the same bits.

        A GEMM over a transposed view, as some blocks pack latents, rounds differently from one over its copy.
        """
        if not self._config.capture:
            return tensors
        return {name: x.contiguous() for name, x in tensors.items()}

    def release(self) -> None:
        """Release all steps and their graphs, but not weights."""
        for steps in self._steps.values():
            steps.clear()
        self._steps.clear()
        self._hoisted.clear()

    def close(self) -> None:
        """Release everything, graphs first: they hold the communicator's kernels."""
        self._memory.forget(self._hoisted.clear)
        self.release()
        self._weights.clear()

    def _step(self, branch: Branch, team: Team) -> _Step:
        weights = self._fast_weights(branch.module, team)
        padded = self._padded_lengths(branch, weights)
        shape = shape_of(branch) if padded is None else self._padded_shape(branch, padded)

        def make() -> _Step:
            if weights is None:
                return self._module_step(branch, team)
            return self._fast_step(branch, team, weights, padded)

        steps = self._steps.setdefault((team.ranks, team.spec), LRUCache(MAX_SHAPES, self._on_eviction))
        return steps.get(shape, make)

    def _on_eviction(self, step: _Step) -> None:
        """Close the step's graph, which may leave room for a graph that had none."""
        if step.captured is not None:
            step.captured.close()
            for other in self._all_steps():
                other.has_room = True

    def _padded_lengths(self, branch: Branch, weights: FastWeights | None) -> Mapping[str, int] | None:
        """Return the lengths that the prompt is padded to; None without padding."""
        if weights is None or not self._config.prompt_windows:
            return None
        return weights.filled_lengths(branch.arguments)

    def _padded_shape(self, branch: Branch, lengths: Mapping[str, int]) -> Hashable:
        """Return the shape shared by steps whose inputs are padded to ``lengths``."""
        name = self._model.latents
        return shape_of(replace(branch, inputs={name: branch.inputs[name]})), tuple(lengths.items())

    def _fast_step(self, branch: Branch, team: Team, weights: FastWeights, padded: Mapping[str, int] | None) -> _Step:
        lengths, latents = padded or weights.lengths(branch.arguments), self._model.latents
        if lengths is None:
            layout = self._sharded.layout(branch, team)
        else:
            layout = TokenLayout.of(tuple(lengths), lengths, team.context.size)
        choices: dict[str, Any] = {"peer_memory": self.rules.peer_memory, "side_streams": self.rules.side_streams}
        choices |= {"fills_prompts": padded is not None, "attention": branch.attention or self._config.attention}
        fast = FastStep(weights, team, layout, latents=branch.inputs[latents], **choices)

        def prepare(branch: Branch) -> StepTensors:
            return {latents: fast.tokens(branch.inputs[latents]), **self._hoisted.step_tensors(branch, weights, fast)}

        return _Step(prepare=prepare, function=lambda tensors: fast(tensors[latents], tensors))

    def _module_step(self, like: Branch, team: Team) -> _Step:
        # Layers outside their blocks' forwards:
        is_offloaded = self._config.offloaded_blocks and not self._model.hoists_by_blocks
        runs_apart = team.spec.divides_weights or is_offloaded
        hoist = None if runs_apart else self._model.hoisted
        module, fixed = like.module, replace(like, inputs={}, schedule=None, additions=())

        def prepare(branch: Branch) -> StepTensors:
            if hoist is None:
                return branch.inputs
            return {**branch.inputs, **self._hoisted.module_inputs(branch, self._sharded.module(module, team), hoist)}

        def function(tensors: StepTensors) -> Tensor:
            return self._sharded.forward(replace(fixed, inputs=tensors), team)

        return _Step(prepare=prepare, function=function, is_short=self.allows_capture(like, team))

    def _fast_weights(self, module: str, team: Team) -> FastWeights | None:
        """Return the weights of the team's hand-ordered steps; None if the module itself runs."""
        return self.weights(module) if self.is_fast(team) else None

    def is_fast(self, team: Team) -> bool:
        """Return whether the team runs hand-ordered steps."""
        return self._config.fast and not team.spec.divides_weights

    def quantised_weights(self, module: str, team: Team) -> FastWeights | None:
        """Return the weights of the team's steps if they are quantised copies of the module's."""
        return None if self._config.precision == "native" else self._fast_weights(module, team)

    @property
    def arranged(self) -> Mapping[str, FastWeights]:
        """Weights of hand-ordered steps so far."""
        return dict(self._weights)

    def weights(self, module: str) -> FastWeights:
        """Return the fast weights of a module, arranged at first use.

        Quantised ones replace the module's own, except those that additions change.
        """
        if module not in self._weights:
            assert self._model.fast is not None
            precision: Precision = "fp8" if self._config.precision == "fp8" else "native"
            with self._memory.region(), self._device:
                own = self._model.modules[module]
                self._weights[module] = weights = self._model.fast(own, precision)
                weights.release(unless=changed_parameters(own, self._model, module))
                move_from_host(own.parameters(), self._device)
        return self._weights[module]

    def _may_capture(self, step: _Step, branch: Branch, tensors: StepTensors, team: Team) -> bool:
        if not self._config.capture or not step.has_room or step.num_runs < RUNS_BEFORE_CAPTURE:
            return False
        num_bytes = sum(x.nbytes for x in tensors.values())
        if self._model.reads_values and tensors.keys() == branch.inputs.keys():
            level, why = logging.WARNING, "it recomputes inputs that others compute once a job"
        elif num_bytes > MAX_CAPTURED_BYTES:
            level, why = logging.WARNING, f"its inputs take {num_bytes / 2**30:.1f} GiB"
        elif not step.is_short:
            level, why = logging.INFO, "it takes seconds"
        else:
            return True
        if step.num_runs == RUNS_BEFORE_CAPTURE:
            fields = {"ranks": team.ranks, "strategy": team.spec.name}
            logger.log(level, "a step is not captured: %s", why, extra=fields)
        return False

    def allows_capture(self, branch: Branch, team: Team) -> bool:
        """Return whether a shape's later steps may be replays, by its arithmetic: equal on all ranks of the gang."""
        if not self._config.capture or self.is_fast(team):
            return self._config.capture
        num_ranks = team.spec.context * team.spec.tensor
        return rough_flops(self._model, branch) <= num_ranks * MAX_CAPTURED_FLOPS

    @property
    def num_captured(self) -> int:
        """Steps that are replays now."""
        return sum(step.captured is not None for step in self._all_steps())

    def _capture(self, step: _Step, tensors: StepTensors, team: Team) -> CapturedStep | None:
        """Return the captured step; None if a lone rank lacks memory. In a team, where others captured, raise it."""
        if self._pool is None or not self.num_captured:
            self._pool = GraphPool(self._device)  # a pool whose graphs are gone may accept no new ones
        fields = {"ranks": team.ranks, "strategy": team.spec.name}
        try:
            captured = CapturedStep(step.function, tensors, self._pool)
        except torch.OutOfMemoryError as error:
            if len(team.ranks) > 1:
                raise
            step.has_room = False
            logger.warning("a step is not captured: no memory for its graph: %s", error, extra=fields)
            return None
        logger.info("captured a step", extra=fields)
        return captured

    def _all_steps(self) -> Iterator[_Step]:
        return (step for steps in self._steps.values() for step in steps)
