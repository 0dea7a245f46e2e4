"""From a family's model, a strategy and a number of ranks to engine graphs and the torch parts around them."""

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
class Exported:
    """Engine graphs with what runs in torch around them. The same on every rank of the team.

    One graph, or with a ring in torch one per kind of segment, and ``segments`` lists these in running order.
    ``prologue(**inputs, rank_index)`` gives what ``prologue_outputs`` names; ``epilogue`` takes what
    ``epilogue_inputs`` names.
    """

    graphs: tuple[EngineGraph, ...]
    prologue: fx.GraphModule
    epilogue: fx.GraphModule
    prologue_outputs: tuple[str, ...]
    epilogue_inputs: tuple[str, ...]
    segments: tuple[Segment, ...] = ()

    @property
    def graph(self) -> EngineGraph:
        """The only graph; of an engine in segments that of the last one."""
        return self.graphs[-1]

    def run_prologue(self, inputs: ModelInputs, rank_index: int) -> dict[str, Tensor]:
        """Returns what torch computes first, by name: this rank's tokens, rotary rows, timestep sinusoids."""
        names = [str(node.target) for node in self.prologue.graph.nodes if node.op == "placeholder"]
        tensors = {name: inputs[name] for name in names if name != RANK}
        with torch.no_grad():
            outputs = self.prologue(**tensors, **{RANK: rank_index})
        return dict(zip(self.prologue_outputs, outputs, strict=True))

    def engine_inputs(self, prologue_outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns those that the engine takes; the rest (sizes) goes round it."""
        return {name: prologue_outputs[name] for name in self.graph.inputs}

    def run_epilogue(self, prologue_outputs: Mapping[str, Tensor], engine_outputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the whole prediction from the engine's outputs, and what went round the engine."""
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
) -> Exported:
    """Exports ``branch``'s forward as one rank of ``team`` runs it; only shapes and dtypes of its inputs matter.

    ``dynamic`` names dims as ``torch.export`` does. Raises ValueError for what TensorRT cannot do.
    """
    if team.tensor.size > 1 and not weights_as_inputs:
        raise ValueError(
            "tensor parallelism gives every rank its own weights: they must be inputs, or no engine file fits all"
        )
    traced = trace(model, branch, team, dynamic, change, ring)
    _check_dynamic(traced, dynamic or {})
    parts = partition(traced)
    graph = export_core(parts, team.context.size * team.tensor.size, weights_as_inputs=weights_as_inputs)
    return _exported(parts, (graph,))


def export_segments(model: DenoiserModel, branch: Branch, team: Team, *, change: ChangeModule = unchanged) -> Exported:
    """Exports the same in segments, cut at the attentions: for a ring in torch."""
    parts = partition(trace(model, branch, team, None, change, "segments"))
    segments, kinds = segment_core(parts, team.context.size * team.tensor.size)
    return _exported(parts, kinds, segments)


def rank_weights(model: DenoiserModel, module: str, team: Team) -> dict[str, Tensor]:
    """Returns the tensors that one rank binds to an engine's weight inputs, by ``state_dict`` key."""
    whole: nn.Module = model.modules[module]
    share = split_weights(whole, model.plan, team.tensor) if team.tensor.size > 1 else whole
    return dict(share.state_dict())


def place_of(team: Team) -> int:
    """Returns the rank's place among those that hold other tokens, or other weights: an engine's ranks share one."""
    assert team.context.size == 1 or team.tensor.size == 1, team
    return team.context.index if team.context.size > 1 else team.tensor.index


def _exported(parts: Parts, graphs: tuple[EngineGraph, ...], segments: tuple[Segment, ...] = ()) -> Exported:
    return Exported(
        graphs=graphs,
        prologue=parts.prologue,
        epilogue=parts.epilogue,
        prologue_outputs=parts.prologue_outputs,
        epilogue_inputs=parts.epilogue_inputs,
        segments=segments,
    )


def _check_dynamic(traced: fx.GraphModule, dynamic: DynamicDims) -> None:
    """Raises ValueError for a dim that the tracer fixed: it does so quietly where the model's code depends on it."""
    for node in traced.graph.nodes:
        for dim in dynamic.get(input_name(node), None) or () if node.op == "placeholder" else ():
            if isinstance(node.meta["val"].shape[dim], int):
                raise ValueError(
                    f"dim {dim} of input {input_name(node)} cannot vary in one engine: the model's own code fixes it "
                    f"at {node.meta['val'].shape[dim]}; give each such size an engine of its own"
                )
