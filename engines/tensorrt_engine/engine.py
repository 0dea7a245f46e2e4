"""The engine that runs TensorRT engine files on a rank or a team of a gang."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.resources import LRUCache
from engines.fast.graph import CapturedStep, GraphPool
from engines.parallel.division import Division, shape_of
from engines.parallel.mesh import Team
from engines.tensorrt_engine.export.buckets import fits_export, shared_branches
from engines.tensorrt_engine.export.exported import EngineExport
from engines.tensorrt_engine.export.exporter import Exporter
from engines.tensorrt_engine.run.step import EngineStep, MakeRunner, make_step

MAX_SHAPES = 16
"""Shapes per team with an execution context each, which holds a step's memory; more if more are expected."""


@dataclass(slots=True)
class _Step:
    """The step for one shape on one team."""

    run: EngineStep
    """Runs the step with new tensors."""
    captured: CapturedStep | None = None
    """Its CUDA graph; None before it is captured."""

    def close(self) -> None:
        """Release the CUDA graph, then the context whose memory it uses."""
        if self.captured is not None:
            self.captured.close()
        self.run.close()


class TensorRTEngine:
    """An ``Engine``, made on every rank at the same time.

    ``buckets`` are branches in the expected sizes. Buckets of one module and team share an engine file, whose profile
    covers all sizes between them. Any other size gets its own file at its first step. ``capture`` puts each step into
    a CUDA graph at its first call.
    """

    def __init__(
        self,
        model: DenoiserModel,
        *,
        division: Division,
        make_runner: MakeRunner,
        exporter: Exporter | None = None,
        buckets: Sequence[Branch] = (),
        capture: bool = True,
    ) -> None:
        self.division = division
        self._model = model
        self._make_runner = make_runner
        self._exporter = exporter or Exporter(model=model)
        self._buckets = tuple(buckets)
        self._capture = capture
        self._shared: dict[Any, tuple[list[Branch], EngineExport] | None] = {}
        self._steps: dict[Any, LRUCache[_Step]] = {}
        """Steps by team key, then by shape. Ranks of a team request the same shapes in the same order."""
        self._pool: GraphPool | None = None
        self._was_warm = False

    @torch.no_grad()
    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.predict``. Neighbouring branches of equal shape may run at the same time (guidance)."""
        self._was_warm = True
        return self.division.predict(branches, ranks, self._forward)

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """See ``Engine.warm_up``: load or build engine files, and capture steps."""
        self.predict(branches, ranks)

    @property
    def was_warm(self) -> bool:
        """See ``Engine.was_warm``."""
        return self._was_warm

    @property
    def team_sizes(self) -> tuple[int, ...]:
        return self.division.team_sizes

    @property
    def estimates(self) -> None:
        """See ``Engine.estimates``: the cost model covers the torch engine alone."""
        return None

    def prepare(self) -> None:
        """Make the steps of all buckets for every team of the caller. Collective over the gang."""
        for ranks in dict.fromkeys(team.ranks for team in self.division.teams.all()):
            num_together = range(1, len(self.division.specs.of(len(ranks))) + 1)
            for num_branches, branch in itertools.product(num_together, self._buckets):
                self._step(branch, self.division.team(ranks, num_branches))

    def close(self) -> None:
        """Release graphs and contexts. The communicator must still be alive."""
        for steps in self._steps.values():
            steps.clear()
        self._steps.clear()

    def _forward(self, branch: Branch, team: Team) -> Tensor:
        is_new = shape_of(branch) not in self._team_steps(team)
        step = self._step(branch, team)
        self._was_warm = self._was_warm and not is_new and (step.captured is not None or not self._capture)
        inputs = {name: x for name, x in branch.inputs.items() if x is not None}
        if not self._capture:
            return step.run(branch.inputs)
        if step.captured is None:
            self._pool = self._pool or GraphPool(next(iter(inputs.values())).device)
            step.captured = CapturedStep(step.run, inputs, self._pool)
        return step.captured(inputs).clone()

    def _team_steps(self, team: Team) -> LRUCache[_Step]:
        capacity = max(MAX_SHAPES, len(self._buckets))
        return self._steps.setdefault(_team_key(team), LRUCache(capacity, _Step.close))

    def _step(self, branch: Branch, team: Team) -> _Step:
        """Return the step for the branch's shape. The first call for a shape is collective over the team."""

        def make() -> _Step:
            exported = self._shared_export(branch, team) or self._exporter.export((branch,), team)
            return _Step(make_step(exported, self._model, branch, team, self._make_runner))

        return self._team_steps(team).get(shape_of(branch), make)

    def _shared_export(self, branch: Branch, team: Team) -> EngineExport | None:
        """Return the export that several buckets share, if ``branch`` lies between their sizes; None otherwise."""
        key = (_team_key(team), branch.module)
        if key not in self._shared:
            buckets = [bucket for bucket in self._buckets if bucket.module == branch.module]
            shared = [] if self._exporter.is_segmented(team) else shared_branches(self._model, buckets, team)
            self._shared[key] = (shared, self._exporter.export(shared, team)) if shared else None
        found = self._shared[key]
        return found[1] if found is not None and fits_export(self._model, branch, team, *found) else None


def _team_key(team: Team) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what distinguishes the caller's teams: no guidance axis, as each of its parts is its own team."""
    return team.context.ranks, team.tensor.ranks
