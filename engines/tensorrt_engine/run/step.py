"""One branch's forward on one rank through an engine: prepared once per shape, then called every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.mesh import Team
from engines.tensorrt_engine.build.builder import BuildOptions, build
from engines.tensorrt_engine.build.engine_cache import CachedPlan, PlanCache, PlanKey
from engines.tensorrt_engine.build.progress import ProgressBar
from engines.tensorrt_engine.config import ResolvedConfig
from engines.tensorrt_engine.export.exported import Exported, rank_weights
from engines.tensorrt_engine.export.onnx_graph import EngineGraph


class Runner(Protocol):
    """What runs an engine graph on one rank: TensorRT's ``PlanRunner``, or a stand-in in tests."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


MakeRunner = Callable[[EngineGraph, Mapping[str, Tensor], Team], Runner]
"""Called on every rank of a team at the same time; weights are those the graph takes as inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """``before`` in torch, the engine, ``after`` in torch."""

    exported: Exported
    runner: Runner
    rank_index: int

    def __call__(self, inputs: ModelInputs) -> Tensor:
        handed = self.exported.feed(inputs, self.rank_index)
        outputs = self.runner.run(self.exported.engine_inputs(handed))
        return self.exported.finish(handed, outputs)

    def close(self) -> None:
        self.runner.close()


def make_step(exported: Exported, model: DenoiserModel, branch: Branch, team: Team, make_runner: MakeRunner) -> Step:
    """With a runner of its own. Every rank of the team makes this call at the same time."""
    weights = rank_weights(model, branch.module, team)
    runner = make_runner(exported.graph, {name: weights[name] for name in exported.graph.weights}, team)
    return Step(exported=exported, runner=runner, rank_index=team.context.index)


def cached_plan(
    graph: EngineGraph, config: ResolvedConfig, options: BuildOptions, cache: PlanCache, *, visible: bool = False
) -> CachedPlan:
    """The graph's plan for the graph's own profiles, built if the cache has none."""
    serialized, options = graph.serialized(), dataclasses.replace(options, profiles=graph.profiles)
    key = PlanKey.of(
        serialized,
        strategy=config.spec.name,
        num_ranks=graph.num_ranks,
        precision=config.precision,
        options=options,
    )
    return cache.get_or_build(key, lambda: build(serialized, options, bar=ProgressBar(visible=visible)))
