"""The engine that runs TensorRT engine files on one rank or any team of a gang."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.resources import Recent
from engines.fast.graph import CapturedStep, GraphPool
from engines.parallel.division import Division, shape_of
from engines.parallel.mesh import Team
from engines.tensorrt_engine.export.buckets import lies_between, sharing
from engines.tensorrt_engine.export.exported import Exported
from engines.tensorrt_engine.export.exporter import Exporter
from engines.tensorrt_engine.run.step import EngineStep, MakeRunner, make_step

MAX_SHAPES = 16
"""For which a team keeps a context each, with the memory that a step needs; more, where more are expected."""


@dataclass(slots=True)
class _Step:
    """What runs for one shape on one team."""

    run: EngineStep
    captured: CapturedStep | None = None

    def close(self) -> None:
        """The graph first: it holds on to the context's memory."""
        if self.captured is not None:
            self.captured.close()
        self.run.close()


class TensorRTEngine:
    """An ``Engine``, made on every rank at the same time.

    ``buckets`` are branches in the sizes that are expected: those of one module and team share a file, whose profile
    takes every size between them. Other sizes get one of their own when they first come. ``capture`` puts each step
    in a CUDA graph at its first call.
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
        self._shared: dict[Any, tuple[list[Branch], Exported] | None] = {}
        self._steps: dict[Any, Recent[_Step]] = {}
        """By the team's place, then by shape. Ranks of a team ask for the same shapes in the same order."""
        self._pool: GraphPool | None = None
        self._was_warm = False

    @torch.no_grad()
    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.predict``. Neighbouring branches of equal shape may run at the same time (guidance)."""
        self._was_warm = True
        return self.division.predict(branches, ranks, self._forward)

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """See ``Engine.warm_up``: engine files are built or found, and steps captured."""
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
        """See ``Engine.estimates``: the cost model is of the other engine's steps."""
        return None

    def prepare(self) -> None:
        """Make the steps of all expected sizes for every team of the caller. All ranks of the gang call it at once."""
        for ranks in dict.fromkeys(team.ranks for team in self.division.teams.all()):
            num_together = range(1, len(self.division.specs.of(len(ranks))) + 1)
            for num_branches, branch in itertools.product(num_together, self._buckets):
                self._step(branch, self.division.team(ranks, num_branches))

    def close(self) -> None:
        """Graphs and contexts; the communicator goes last, and elsewhere."""
        for steps in self._steps.values():
            steps.clear()
        self._steps.clear()

    def _forward(self, branch: Branch, team: Team) -> Tensor:
        is_new = shape_of(branch) not in self._known(team)
        step = self._step(branch, team)
        self._was_warm = self._was_warm and not is_new and (step.captured is not None or not self._capture)
        inputs = {name: x for name, x in branch.inputs.items() if x is not None}
        if not self._capture:
            return step.run(branch.inputs)
        if step.captured is None:
            self._pool = self._pool or GraphPool(next(iter(inputs.values())).device)
            step.captured = CapturedStep(step.run, inputs, self._pool)
        return step.captured(inputs).clone()

    def _known(self, team: Team) -> Recent[_Step]:
        most = max(MAX_SHAPES, len(self._buckets))
        return self._steps.setdefault(_place(team), Recent(most, _Step.close))

    def _step(self, branch: Branch, team: Team) -> _Step:
        """Made at its first call, which is collective over the team. Each shape has a context (a runner) of its own:
        a CUDA graph holds on to the memory of the context that it captured.
        """

        def make() -> _Step:
            exported = self._shared_export(branch, team) or self._exporter.export((branch,), team)
            return _Step(make_step(exported, self._model, branch, team, self._make_runner))

        return self._known(team).get(shape_of(branch), make)

    def _shared_export(self, branch: Branch, team: Team) -> Exported | None:
        """The one export of all buckets that share it, if there are several and ``branch`` lies between them."""
        key = (_place(team), branch.module)
        if key not in self._shared:
            buckets = [bucket for bucket in self._buckets if bucket.module == branch.module]
            shared = [] if self._exporter.is_segmented(team) else sharing(self._model, buckets, team)
            self._shared[key] = (shared, self._exporter.export(shared, team)) if shared else None
        found = self._shared[key]
        return found[1] if found is not None and lies_between(self._model, branch, team, *found) else None


def _place(team: Team) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tells the caller's teams apart; guidance does not, for each part of it is a team of its own."""
    return team.context.ranks, team.tensor.ranks
