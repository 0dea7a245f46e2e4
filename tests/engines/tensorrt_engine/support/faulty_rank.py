"""A gang's rank with a TensorRT engine whose graphs onnxruntime runs, and which fails to enqueue on request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engines.core.engine import RankContext
from engines.core.model import Branch
from engines.core.spec import ParallelSpec
from engines.gang.gang_config import BuildRank, RankParts
from engines.parallel.division import Division, TeamSpecs
from engines.parallel.mesh import Groups, Team
from engines.tensorrt_engine.build.export_cache import ExportCache
from engines.tensorrt_engine.engine import TensorRTEngine
from engines.tensorrt_engine.export.exporter import Exporter
from engines.tensorrt_engine.export.graph import EngineGraph
from engines.tensorrt_engine.run.runtime import EnqueueError
from tests.engines.tensorrt_engine.support.gloo_runner import GlooRunner
from tests.engines.tensorrt_engine.support.zoo import wan_inputs, wan_model

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    seed: int
    x: Tensor
    step: int = 0


class Solver:
    """Steps along the model's own predictions."""

    def begin(self, request: int, conditioning: object) -> State:
        return State(seed=request, x=wan_inputs(1, 3, 6, 10)["hidden_states"] + request)

    def num_steps(self, state: State) -> int:
        return NUM_STEPS

    def branches(self, state: State) -> tuple[Branch, ...]:
        return (Branch(inputs=wan_inputs(1, 3, 6, 10) | {"hidden_states": state.x}),)

    def advance(self, state: State, predictions: tuple[Tensor, ...]) -> State:
        return replace(state, x=state.x - 0.1 * predictions[0], step=state.step + 1)

    def latents(self, state: State) -> Tensor:
        return state.x

    def preview(self, state: State) -> Tensor:
        return state.x


class FaultyRunner(GlooRunner):
    """``fault`` "refuses": TensorRT reports that it cannot enqueue. "hangs": its call does not return."""

    fault, fault_run = "", 0

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.fault and self.num_runs + 1 == self.fault_run:
            if self.fault == "hangs":
                time.sleep(10**6)
            raise EnqueueError("TensorRT could not enqueue the step: no reason given")
        return super().run(inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFaulty:
    """A ``LoadRank``. Rank 1's runner has the fault at its run ``fault_run``."""

    folder: Path
    fault: str = ""
    fault_run: int = NUM_STEPS + 2

    def __call__(self, context: RankContext) -> BuildRank:
        return partial(self._build, context)

    def _build(self, context: RankContext) -> RankParts:
        torch.set_num_threads(1)
        spec = ParallelSpec.of("ulysses", context.num_ranks)
        model, num_ranks = wan_model(), context.num_ranks
        specs = TeamSpecs(by_size={num_ranks: (spec, spec)})
        division = Division(specs, model.plan, rank=context.rank, num_ranks=num_ranks, groups=Groups(num_ranks))

        def make(graph: EngineGraph, weights: Mapping[str, Tensor], team: Team) -> FaultyRunner:
            runner = FaultyRunner(graph, weights, team)
            if context.rank == 1:
                runner.fault, runner.fault_run = self.fault, self.fault_run
            return runner

        engine = TensorRTEngine(
            model,
            division=division,
            make_runner=make,
            exporter=Exporter(model=model, cache=ExportCache(self.folder)),
            buckets=[Branch(inputs=wan_inputs(1, 3, 6, 10))],
            capture=False,
        )
        engine.prepare()
        return RankParts(engine=engine, sampler=Solver())
