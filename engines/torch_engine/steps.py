"""One branch over one team, by the fastest path there is: the family's fast model if it has one, captured if asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel, FastWeights, Precision, StepTensors
from engines.core.resources import LRUCache
from engines.fast.graph import CapturedStep, GraphPool
from engines.parallel.division import shape_of
from engines.parallel.mesh import Team
from engines.parallel.sharded import ShardedModel
from engines.torch_engine.config import TorchChoices
from engines.torch_engine.fast_step import FastStep
from engines.torch_engine.hoisted import HoistedCache

logger = logging.getLogger(__name__)

MAX_SHAPES = 32
"""The number of shapes whose steps, with their graphs, are kept for one division of one team; the one that came longest
ago goes. Counted so, ranks that work together agree: branches may bring the parts of a team different shapes, but not
the ranks of a part.
"""

RUNS_BEFORE_CAPTURE = 1
"""A new shape is served at once, uncaptured; its second step captures."""


@dataclass(slots=True)
class _Step:
    """What runs for one shape on one team."""

    prepare: Callable[[Branch], StepTensors]
    function: Callable[[StepTensors], Tensor]
    num_runs: int = 0
    captured: CapturedStep | None = None
    has_room: bool = True
    """For a graph, as far as is known: there was none, and no other graph has gone since."""


class StepRunner:
    """Runs branches. All ranks of a team make the same calls in the same order, so they capture at the same moment."""

    def __init__(
        self, model: DenoiserModel, sharded: ShardedModel, *, config: TorchChoices, device: torch.device
    ) -> None:
        self._model, self._sharded, self._config = model, sharded, config
        self.rules = config.exchange
        """By these, steps that are made from now on exchange heads."""
        self._device = device
        self._pool: GraphPool | None = None
        """Of the graphs that there are."""
        self._hoisted = HoistedCache(latents=model.latents, timestep=model.timestep)
        self._weights: dict[str, FastWeights] = {}
        self._steps: dict[Hashable, LRUCache[_Step]] = {}
        """By team, and how it divides a step; then by shape."""
        self.was_warm = False
        """Whether the last run was a replay without a capture; where nothing is captured: its shape had run before."""

    def run(self, branch: Branch, team: Team) -> Tensor:
        """Return the whole prediction, equal on all ranks of the team's context and tensor axes."""
        step = self._step(branch, team)
        tensors = step.prepare(branch)
        captures = step.captured is None and self._may_capture(step, branch, tensors, team)
        self.was_warm = step.num_runs > 0 and not captures
        if captures:
            step.captured = self._capture(step, tensors, team)
        step.num_runs += 1
        if step.captured is None:
            return step.function(tensors)
        return step.captured(tensors).clone()

    def release(self) -> None:
        """Lets go of all steps and their graphs; weights stay."""
        for steps in self._steps.values():
            steps.clear()
        self._steps.clear()
        self._hoisted.clear()

    def close(self) -> None:
        """Release graphs first: they hold the communicator's kernels."""
        self.release()
        self._weights.clear()

    def _step(self, branch: Branch, team: Team) -> _Step:
        weights = self._fast_weights(branch.module, team)
        filled = self._filled_lengths(branch, weights)
        shape = shape_of(branch) if filled is None else self._filled_shape(branch, filled)

        def make() -> _Step:
            if weights is None:
                return self._module_step(branch, team)
            return self._fast_step(branch, team, weights, filled)

        steps = self._steps.setdefault((team.ranks, team.spec), LRUCache(MAX_SHAPES, self._let_go))
        return steps.get(shape, make)

    def _let_go(self, step: _Step) -> None:
        """A graph that goes may leave room for one of those for which there was none."""
        if step.captured is not None:
            step.captured.close()
            for other in self._all_steps():
                other.has_room = True

    def _filled_lengths(self, branch: Branch, weights: FastWeights | None) -> Mapping[str, int] | None:
        """Return what the prompt is filled up to; None where it stays as long as it is."""
        if weights is None or not self._config.prompt_windows:
            return None
        return weights.filled_lengths(branch.arguments)

    def _filled_shape(self, branch: Branch, lengths: Mapping[str, int]) -> Hashable:
        """What such steps have in common, of inputs that were filled up to ``lengths``."""
        name = self._model.latents
        return shape_of(replace(branch, inputs={name: branch.inputs[name]})), tuple(lengths.items())

    def _fast_step(self, branch: Branch, team: Team, weights: FastWeights, filled: Mapping[str, int] | None) -> _Step:
        lengths, latents = filled or weights.lengths(branch.arguments), self._model.latents
        if lengths is None:
            layout = self._sharded.layout(branch, team)
        else:
            layout = TokenLayout.of(tuple(lengths), lengths, team.context.size)
        ways = {"peer_memory": self.rules.peer_memory, "side_streams": self.rules.side_streams}
        ways |= {"fills_prompts": filled is not None}
        fast = FastStep(weights, team, layout, latents=branch.inputs[latents], **ways)

        def prepare(branch: Branch) -> StepTensors:
            return {latents: fast.tokens(branch.inputs[latents]), **self._hoisted.step_tensors(branch, weights, fast)}

        return _Step(prepare=prepare, function=lambda tensors: fast(tensors[latents], tensors))

    def _module_step(self, like: Branch, team: Team) -> _Step:
        hoist = None if team.spec.divides_weights else self._model.hoisted
        module, constants = like.module, like.constants

        def prepare(branch: Branch) -> StepTensors:
            if hoist is None:
                return branch.inputs
            return {**branch.inputs, **self._hoisted.module_inputs(branch, self._sharded.module(module, team), hoist)}

        def function(tensors: StepTensors) -> Tensor:
            return self._sharded.forward(Branch(inputs=tensors, module=module, constants=constants), team)

        return _Step(prepare=prepare, function=function)

    def _fast_weights(self, module: str, team: Team) -> FastWeights | None:
        """Return what the team's steps read; None where the module itself runs."""
        is_fast = self._config.fast and not team.spec.divides_weights
        return self.weights(module) if is_fast else None

    def quantised_weights(self, module: str, team: Team) -> FastWeights | None:
        """Return what the team's steps read, if it holds weights in another form than the module does."""
        return None if self._config.precision == "native" else self._fast_weights(module, team)

    def weights(self, module: str) -> FastWeights:
        """Return the fast weights of a module, arranged at first use (at start, by the self-check)."""
        if module not in self._weights:
            assert self._model.fast is not None
            precision: Precision = "fp8" if self._config.precision == "fp8" else "native"
            self._weights[module] = self._model.fast(self._model.modules[module], precision)
        return self._weights[module]

    def _may_capture(self, step: _Step, branch: Branch, tensors: StepTensors, team: Team) -> bool:
        if not self._config.capture or not step.has_room or step.num_runs < RUNS_BEFORE_CAPTURE:
            return False
        reads_values = self._model.reads_values and tensors.keys() == branch.inputs.keys()
        if reads_values and step.num_runs == RUNS_BEFORE_CAPTURE:
            told = {"ranks": team.ranks, "strategy": team.spec.name}
            logger.warning("a step is not captured: it makes anew what others make once a job", extra=told)
        return not reads_values

    def _capture(self, step: _Step, tensors: StepTensors, team: Team) -> CapturedStep | None:
        """None where a rank by itself has no memory for the graph. Of several the others have recorded theirs."""
        if self._pool is None or not self._has_graphs():
            self._pool = GraphPool(self._device)  # one whose graphs are gone may take no new ones
        told = {"ranks": team.ranks, "strategy": team.spec.name}
        try:
            captured = CapturedStep(step.function, tensors, self._pool)
        except torch.OutOfMemoryError as error:
            if len(team.ranks) > 1:
                raise
            step.has_room = False
            logger.warning("a step is not captured: there is no memory for its graph: %s", error, extra=told)
            return None
        logger.info("captured a step", extra=told)
        return captured

    def _has_graphs(self) -> bool:
        return any(step.captured is not None for step in self._all_steps())

    def _all_steps(self) -> Iterator[_Step]:
        return (step for steps in self._steps.values() for step in steps)
