"""The one exporter: a family's model, a strategy and a number of ranks in; engine graphs and their torch parts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.mesh import Team
from engines.parallel.tensor import split_weights
from engines.tensorrt_engine.config import RingForm
from engines.tensorrt_engine.export.onnx_graph import EngineGraph, export_core
from engines.tensorrt_engine.export.partition import Parts, partition
from engines.tensorrt_engine.export.segments import Segment, segment_core
from engines.tensorrt_engine.export.subgraph import RANK, input_name
from engines.tensorrt_engine.export.trace import ChangeModule, DynamicDims, trace, unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Engine graphs with what runs in torch around them. The same on every rank of the team.

    One graph, or with a ring in torch one per form of the pieces, which ``segments`` lists in running order.
    ``before(**inputs, rank_index)`` gives what ``handed`` names; ``after`` takes what ``after_inputs`` names.
    """

    graphs: tuple[EngineGraph, ...]
    before: fx.GraphModule
    after: fx.GraphModule
    handed: tuple[str, ...]
    after_inputs: tuple[str, ...]
    segments: tuple[Segment, ...] = ()

    @property
    def graph(self) -> EngineGraph:
        """The only graph; of a cut engine the last piece's."""
        return self.graphs[-1]

    def feed(self, inputs: ModelInputs, rank_index: int) -> dict[str, Tensor]:
        """What torch computes first, by name: this rank's tokens, rotary rows, timestep sinusoids."""
        wanted = [node.target for node in self.before.graph.nodes if node.op == "placeholder"]
        given = {str(name): inputs[str(name)] for name in wanted if name != RANK}
        with torch.no_grad():
            handed = self.before(**given, **{RANK: rank_index})
        return dict(zip(self.handed, handed, strict=True))

    def engine_inputs(self, handed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``handed`` that the engine takes; the rest (sizes) goes round it."""
        return {name: handed[name] for name in self.graph.inputs}

    def finish(self, handed: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Tensor:
        """The whole prediction from the engine's outputs (and what was handed round it)."""
        known = {**handed, **outputs}
        with torch.no_grad():
            (prediction,) = self.after(*(known[name] for name in self.after_inputs))
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
    """Export ``branch``'s forward as one rank of ``team`` runs it; only shapes and dtypes of its inputs matter.

    ``dynamic`` names dims as ``torch.export`` does. Raises ValueError for what TensorRT cannot do.
    """
    if team.tensor.size > 1 and not weights_as_inputs:
        raise ValueError(
            "tensor parallelism gives every rank its own weights: they must be inputs, or no plan fits all"
        )
    traced = trace(model, branch, team, dynamic, change, ring)
    _check_dynamic(traced, dynamic or {})
    parts = partition(traced)
    graph = export_core(parts, team.context.size * team.tensor.size, weights_as_inputs=weights_as_inputs)
    return _exported(parts, (graph,))


def export_segments(model: DenoiserModel, branch: Branch, team: Team, *, change: ChangeModule = unchanged) -> Exported:
    """The same in pieces, cut at the attentions: for a ring in torch."""
    parts = partition(trace(model, branch, team, None, change, "segments"))
    segments, forms = segment_core(parts, team.context.size * team.tensor.size)
    return _exported(parts, forms, segments)


def rank_weights(model: DenoiserModel, module: str, team: Team) -> dict[str, Tensor]:
    """The tensors that one rank binds to an engine's weight inputs, by ``state_dict`` key."""
    whole: nn.Module = model.modules[module]
    mine = split_weights(whole, model.plan, team.tensor) if team.tensor.size > 1 else whole
    return dict(mine.state_dict())


def _exported(parts: Parts, graphs: tuple[EngineGraph, ...], segments: tuple[Segment, ...] = ()) -> Exported:
    return Exported(
        graphs=graphs,
        before=parts.before,
        after=parts.after,
        handed=parts.handed,
        after_inputs=parts.after_inputs,
        segments=segments,
    )


def _check_dynamic(traced: fx.GraphModule, dynamic: DynamicDims) -> None:
    """The tracer quietly fixes a dim that the model's code depends on; every other size would then be wrong."""
    for node in traced.graph.nodes:
        for dim in dynamic.get(input_name(node), None) or () if node.op == "placeholder" else ():
            if isinstance(node.meta["val"].shape[dim], int):
                raise ValueError(
                    f"dim {dim} of input {input_name(node)} cannot vary in one engine: the model's own code fixes it "
                    f"at {node.meta['val'].shape[dim]}; give each such size an engine of its own"
                )
