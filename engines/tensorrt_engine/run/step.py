"""One branch's forward on one rank through an engine, whole or in segments: made per shape, called every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engines.core.attention import Kernel
from engines.core.layout import TokenLayout
from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.local_attention import local_kernel
from engines.parallel.mesh import Team
from engines.parallel.strategies import team_kernel
from engines.tensorrt_engine.export.exported import EngineExport, rank_index_of, rank_weights
from engines.tensorrt_engine.export.graph import EngineGraph
from engines.tensorrt_engine.export.segments import Segment


class Runner(Protocol):
    """Runs an engine graph on one rank: TensorRT's ``EngineRunner``, or a fake in tests."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


MakeRunner = Callable[[EngineGraph, Mapping[str, Tensor], Team], Runner]
"""``make_runner(graph, weights, team)``, collective over the team; ``weights`` are the graph's weight inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeStep:
    """A step of one engine file: prologue in torch, engine, epilogue in torch."""

    exported: EngineExport
    """Graph, prologue and epilogue."""
    runner: Runner
    """Runs the engine file."""
    rank_index: int
    """This rank's place among those with other tokens, or other weights: an input of the prologue."""

    def __call__(self, inputs: ModelInputs) -> Tensor:
        prologue_outputs = self.exported.run_prologue(inputs, self.rank_index)
        outputs = self.runner.run(self.exported.engine_inputs(prologue_outputs))
        return self.exported.run_epilogue(prologue_outputs, outputs)

    def close(self) -> None:
        self.runner.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedStep:
    """A step of several engine files, with attention in torch between segments."""

    exported: EngineExport
    """Graphs, segments, prologue and epilogue."""
    runners: tuple[Runner, ...]
    """One for each kind of segment, which binds a segment's own weights at each run."""
    weights: Mapping[str, Tensor]
    """Weights by ``state_dict`` key."""
    kernel: Kernel
    """Attention across the ring."""
    rank_index: int
    """This rank's place among those with other tokens: an input of the prologue."""

    def __call__(self, inputs: ModelInputs) -> Tensor:
        prologue_outputs = self.exported.run_prologue(inputs, self.rank_index)
        values = dict(prologue_outputs)
        for segment in self.exported.segments:
            values.update(self._run(segment, values))
            if segment.attention is not None:
                q, k, v, out = segment.attention
                values[out] = self.kernel(values[q], values[k], values[v])[0]
        return self.exported.run_epilogue(prologue_outputs, values)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()

    def _run(self, segment: Segment, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        graph = self.exported.graphs[segment.kind]
        activations = {own: values[name] for own, name in zip(graph.inputs, segment.inputs, strict=True)}
        weights = {own: self.weights[segment.weights[own]] for own in graph.weights}
        outputs = self.runners[segment.kind].run(activations | weights)
        return {name: outputs[own] for own, name in zip(graph.outputs, segment.outputs, strict=True)}


EngineStep = WholeStep | SegmentedStep


def make_step(
    exported: EngineExport, model: DenoiserModel, branch: Branch, team: Team, make_runner: MakeRunner
) -> EngineStep:
    """Return a step with its own runners. Collective over the team."""
    weights = rank_weights(model, branch.module, team)
    if exported.segments:
        return _segmented_step(exported, model, branch, team, make_runner, weights)
    runner = make_runner(exported.graph, {name: weights[name] for name in exported.graph.weights}, team)
    return WholeStep(exported=exported, runner=runner, rank_index=rank_index_of(team))


def _segmented_step(
    exported: EngineExport,
    model: DenoiserModel,
    branch: Branch,
    team: Team,
    make_runner: MakeRunner,
    weights: Mapping[str, Tensor],
) -> SegmentedStep:
    """Return a step with one runner per kind of segment, without weights: each run binds a segment's own."""
    weight = next(iter(weights.values()))
    layout = TokenLayout.of(model.plan.streams, model.stream_lengths(branch.arguments), team.context.size)
    return SegmentedStep(
        exported=exported,
        runners=tuple(make_runner(graph, {}, team) for graph in exported.graphs),
        weights=weights,
        kernel=team_kernel(local_kernel(weight.device, weight.dtype), team, layout),
        rank_index=team.context.index,
    )
