"""Export for a team, then run the engine graph for all its ranks and the epilogue on each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.core.engine import EagerEngine
from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.export.exported import EngineExport, export, rank_weights
from engines.tensorrt_engine.export.trace import ChangeModule, DynamicDims, offline_team, unchanged
from tests.engines.tensorrt_engine.support.simulate import Simulator


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An exported engine with the weights of each rank."""

    exported: EngineExport
    weights: tuple[dict[str, Tensor], ...]
    simulators: list[Simulator] = field(default_factory=list)

    def predictions(self, inputs: ModelInputs, *, skip_collectives: Collection[int] = ()) -> list[Tensor]:
        graph = self.exported.graph
        prologues = [self.exported.run_prologue(inputs, rank) for rank in range(graph.num_ranks)]
        feeds = [self._feed(rank, self.exported.engine_inputs(values)) for rank, values in enumerate(prologues)]
        results = self._simulator().run(feeds, skip_collectives=skip_collectives)
        outputs = [dict(zip(graph.outputs, map(torch.from_numpy, result), strict=True)) for result in results]
        return [self.exported.run_epilogue(*pair).float() for pair in zip(prologues, outputs, strict=True)]

    def _simulator(self) -> Simulator:
        if not self.simulators:
            self.simulators.append(Simulator(self.exported.graph.serialized()))
        return self.simulators[0]

    def _feed(self, rank: int, activations: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
        tensors = activations | {name: self.weights[rank][name] for name in self.exported.graph.weights}
        return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}


def export_case(
    model: DenoiserModel,
    inputs: ModelInputs,
    spec: ParallelSpec,
    *,
    dynamic: DynamicDims | None = None,
    weights_as_inputs: bool = True,
    change: ChangeModule = unchanged,
) -> Case:
    name = next(iter(model.modules))
    with offline_team(spec) as team:
        branch = Branch(inputs=inputs, module=name)
        exported = export(model, branch, team, dynamic=dynamic, weights_as_inputs=weights_as_inputs, change=change)
        teams = [replace(team, tensor=replace(team.tensor, index=index)) for index in range(team.tensor.size)]
    weights = [rank_weights(model, name, team) for team in teams]
    return Case(exported=exported, weights=tuple(weights * (spec.num_ranks // len(weights))))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedEngine(EagerEngine):
    """An ``Engine`` with ``rank``'s answer; one engine graph runs for all its ranks at each prediction."""

    case: Case
    rank: int = 0
    skip_collectives: Collection[int] = ()

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(
            self.case.predictions(branch.inputs, skip_collectives=self.skip_collectives)[self.rank]
            for branch in branches
        )
