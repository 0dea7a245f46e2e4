"""The engine that runs TensorRT plans on one rank or any team of a gang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engines.model import Branch, DenoiserModel
from engines.parallel.guidance import exchange_predictions, may_pair
from engines.parallel.mesh import Team, Teams
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.captured import CapturedStep
from engines.tensorrt_engine.config import RingForm
from engines.tensorrt_engine.segmented_step import SegmentedStep, prepare_segmented_step
from engines.tensorrt_engine.step import MakeRunner, Step, prepare_step, signature
from engines.tensorrt_engine.trace import ChangeModule, unchanged


class TensorRTEngine:
    """An ``Engine``, made on every rank at the same time. Plans are exported and built for a shape when it first comes.

    ``specs[width]`` are the divisions of one branch, and of two of the same shape. ``capture`` puts each step in a
    CUDA graph at its first call; ``change(module name)`` swaps layers before the export (quantization). ``native_ring``
    gives a ring to TensorRT; else it runs in torch, between pieces of the engine.
    """

    def __init__(
        self,
        model: DenoiserModel,
        *,
        teams: Teams,
        specs: Mapping[int, tuple[ParallelSpec, ParallelSpec]],
        make_runner: MakeRunner,
        weights_as_inputs: bool = True,
        change: Callable[[str], ChangeModule] = lambda name: unchanged,
        native_ring: bool = False,
        capture: bool = True,
    ) -> None:
        self.teams = teams
        self._model = model
        self._specs = specs
        self._make_runner = make_runner
        self._weights_as_inputs = weights_as_inputs
        self._change = change
        self._native_ring = native_ring
        self._capture = capture
        self._steps: dict[Any, Step | SegmentedStep] = {}
        self._captured: dict[Any, CapturedStep] = {}

    @torch.no_grad()
    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.predict``. Two neighbouring branches of equal shape may run at the same time (guidance)."""
        predictions: list[Tensor] = []
        while len(predictions) < len(branches):
            predictions.extend(self._next(branches[len(predictions) :], ranks))
        return tuple(predictions)

    def close(self) -> None:
        """Graphs first, then contexts; the communicator goes last, and elsewhere."""
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()
        for step in self._steps.values():
            step.close()
        self._steps.clear()

    def team(self, ranks: tuple[int, ...], num_branches: int = 1) -> Team:
        """How ``ranks`` divide one branch, or two at once."""
        if len(ranks) not in self._specs:
            allowed = ", ".join(map(str, self._specs))
            raise ValueError(f"this gang cannot divide a step over {len(ranks)} ranks; allowed: {allowed}")
        return self.teams.team(ranks, self._specs[len(ranks)][num_branches - 1])

    def checked_teams(self) -> tuple[Team, ...]:
        """The caller's teams of more than one rank as they divide two branches, narrow ones first."""
        ranks = dict.fromkeys(team.ranks for team in self.teams.all() if len(team.ranks) > 1)
        return tuple(self.team(members, 2) for members in ranks)

    def _next(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        pair = self.team(ranks, 2)
        if pair.guidance.size == 2 and len(branches) > 1 and may_pair(branches[0], branches[1], self._model.plan):
            mine = self._forward(branches[pair.guidance.index], pair)
            return exchange_predictions(mine, pair.guidance)
        return (self._forward(branches[0], self.team(ranks)),)

    def _forward(self, branch: Branch, team: Team) -> Tensor:
        key = (team.context.ranks, team.tensor.ranks, signature(branch))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._prepare(branch, team)
        if not self._capture:
            return step(branch.inputs)
        if key not in self._captured:
            self._captured[key] = CapturedStep(step, branch.inputs)
        return self._captured[key](branch.inputs)

    def _prepare(self, branch: Branch, team: Team) -> Step | SegmentedStep:
        change, make = self._change(branch.module), self._make_runner
        if team.spec.ring > 1 and team.spec.ulysses == 1 and not self._native_ring:
            return prepare_segmented_step(self._model, branch, team, make, change=change)
        as_inputs = self._weights_as_inputs
        ring: RingForm = "native" if self._native_ring else "none"
        return prepare_step(self._model, branch, team, make, weights_as_inputs=as_inputs, change=change, ring=ring)
