"""Export of a model's branch on a team: engine graphs, and the parts around them that run in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.mesh import Team
from engines.parallel.tensor import split_weights
from engines.tensorrt_engine.config import RingForm
from engines.tensorrt_engine.export.graph import EngineGraph, export_core
from engines.tensorrt_engine.export.partition import Parts, partition
from engines.tensorrt_engine.export.segments import Segment, segment_core
from engines.tensorrt_engine.export.subgraph import RANK, input_name
from engines.tensorrt_engine.export.trace import ChangeModule, DynamicDims, trace, unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineExport:
    """Engine graphs and the parts around them that run in torch. Equal on all ranks of the team."""

    graphs: tuple[EngineGraph, ...]
    """One graph, or one per kind of segment."""
    prologue: fx.GraphModule
    """``prologue(**inputs, rank_index)`` returns ``prologue_outputs``."""
    epilogue: fx.GraphModule
    """``epilogue(**values)`` returns the prediction; ``values`` are ``epilogue_inputs``."""
    prologue_outputs: tuple[str, ...]
    """Names of values, which engine and epilogue read."""
    epilogue_inputs: tuple[str, ...]
    """Names of values of prologue and engine."""
    segments: tuple[Segment, ...] = ()
    """Segments in running order, if a ring runs in torch."""

    @property
    def graph(self) -> EngineGraph:
        """The only graph, or that of the last segment."""
        return self.graphs[-1]

    def run_prologue(self, inputs: ModelInputs, rank_index: int) -> dict[str, Tensor]:
        """Return the prologue's outputs by name: this rank's tokens, rotary rows, timestep sinusoids."""
        names = [str(node.target) for node in self.prologue.graph.nodes if node.op == "placeholder"]
        tensors = {name: inputs[name] for name in names if name != RANK}
        with torch.no_grad():
            outputs = self.prologue(**tensors, **{RANK: rank_index})
        return dict(zip(self.prologue_outputs, outputs, strict=True))

    def engine_inputs(self, prologue_outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that the engine takes; the rest (sizes) bypasses it."""
        return {name: prologue_outputs[name] for name in self.graph.inputs}

    def run_epilogue(self, prologue_outputs: Mapping[str, Tensor], engine_outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the whole prediction from the engine's outputs and the prologue's."""
        values = {**prologue_outputs, **engine_outputs}
        with torch.no_grad():
            (prediction,) = self.epilogue(*(values[name] for name in self.epilogue_inputs))
        assert isinstance(prediction, Tensor)
        return prediction


def export(
    model: DenoiserModel,
    branch: Branch,
    team: Team,
    *,
    weights_as_inputs: bool = True,
    dynamic: DynamicDims | None = None,
    change: ChangeModule = unchanged,
    ring: RingForm = "none",
) -> EngineExport:
    """Export ``branch``'s forward as one rank of ``team`` runs it; only shapes and dtypes of its inputs matter.

    ``dynamic`` names dims like ``torch.export``. Raises ValueError for what TensorRT does not support.
    """
    if team.tensor.size > 1 and not weights_as_inputs:
        raise ValueError(
            "tensor parallelism gives every rank its own weights: they must be inputs for one engine file to fit all"
        )
    traced = trace(model, branch, team, dynamic, change, ring)
    _check_dynamic(traced, dynamic or {})
    parts = partition(traced)
    graph = export_core(parts, team.context.size * team.tensor.size, weights_as_inputs=weights_as_inputs)
    return _exported(parts, (graph,))


def export_segments(
    model: DenoiserModel, branch: Branch, team: Team, *, change: ChangeModule = unchanged
) -> EngineExport:
    """Export ``branch``'s forward in segments, cut at the attentions, for a ring in torch."""
    parts = partition(trace(model, branch, team, None, change, "segments"))
    segments, kinds = segment_core(parts, team.context.size * team.tensor.size)
    return _exported(parts, kinds, segments)


def rank_weights(model: DenoiserModel, module: str, team: Team) -> dict[str, Tensor]:
    """Return by ``state_dict`` key the tensors that one rank binds to an engine's weight inputs."""
    whole: nn.Module = model.modules[module]
    share = split_weights(whole, model.plan, team.tensor) if team.tensor.size > 1 else whole
    return dict(share.state_dict())


def rank_index_of(team: Team) -> int:
    """Return the caller's index among the ranks that share the tokens, or the weights; never both in one engine."""
    assert team.context.size == 1 or team.tensor.size == 1, team
    return team.context.index if team.context.size > 1 else team.tensor.index


def _exported(parts: Parts, graphs: tuple[EngineGraph, ...], segments: tuple[Segment, ...] = ()) -> EngineExport:
    return EngineExport(
        graphs=graphs,
        prologue=parts.prologue,
        epilogue=parts.epilogue,
        prologue_outputs=parts.prologue_outputs,
        epilogue_inputs=parts.epilogue_inputs,
        segments=segments,
    )


def _check_dynamic(traced: fx.GraphModule, dynamic: DynamicDims) -> None:
    """Raise ValueError for a dim that the tracer silently fixed because the model's code depends on its size."""
    for node in traced.graph.nodes:
        for dim in dynamic.get(input_name(node), None) or () if node.op == "placeholder" else ():
            if isinstance(node.meta["val"].shape[dim], int):
                raise ValueError(
                    f"dim {dim} of input {input_name(node)} cannot vary in one engine: the model's own code fixes it "
                    f"at {node.meta['val'].shape[dim]}; use a separate engine for each such size"
                )
