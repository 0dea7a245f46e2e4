"""The one exporter: a family's model, a strategy and a width in; an engine graph and its torch parts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engines.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.mesh import Team
from engines.parallel.tensor import split_weights
from engines.tensorrt_engine.config import RingForm
from engines.tensorrt_engine.onnx_export import EngineGraph, export_core
from engines.tensorrt_engine.partition import Parts, partition
from engines.tensorrt_engine.segments import SegmentedCore, segment_core
from engines.tensorrt_engine.subgraph import RANK
from engines.tensorrt_engine.trace import ChangeModule, DynamicDims, trace, unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An engine graph with what runs in torch around it. The same on every rank of the team."""

    graph: EngineGraph
    parts: Parts

    def feed(self, inputs: ModelInputs, rank_index: int) -> dict[str, Tensor]:
        """What torch computes first, by name: this rank's tokens, rotary rows, timestep sinusoids."""
        wanted = [node.target for node in self.parts.before.graph.nodes if node.op == "placeholder"]
        given = {str(name): inputs[str(name)] for name in wanted if name != RANK}
        with torch.no_grad():
            handed = self.parts.before(**given, **{RANK: rank_index})
        return dict(zip(self.parts.handed, handed, strict=True))

    def engine_inputs(self, handed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``handed`` that the engine takes; the rest (sizes) goes round it."""
        return {name: handed[name] for name in self.graph.inputs}

    def finish(self, handed: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Tensor:
        """The whole prediction from the engine's outputs (and what was handed round it)."""
        known = {**handed, **outputs}
        with torch.no_grad():
            (prediction,) = self.parts.after(*(known[name] for name in self.parts.after_inputs))
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
    parts = partition(trace(model, branch, team, dynamic, change, ring))
    return Exported(
        graph=export_core(parts, team.context.size * team.tensor.size, weights_as_inputs=weights_as_inputs), parts=parts
    )


def export_segments(
    model: DenoiserModel, branch: Branch, team: Team, *, change: ChangeModule = unchanged
) -> tuple[Exported, SegmentedCore]:
    """The same in pieces, cut at the attentions: for a ring in torch. ``Exported.graph`` is the last piece's."""
    parts = partition(trace(model, branch, team, None, change, "segments"))
    core = segment_core(parts, team.context.size * team.tensor.size)
    return Exported(graph=core.forms[-1], parts=parts), core


def rank_weights(model: DenoiserModel, module: str, team: Team) -> dict[str, Tensor]:
    """The tensors that one rank binds to an engine's weight inputs, by ``state_dict`` key."""
    whole: nn.Module = model.modules[module]
    mine = split_weights(whole, model.plan, team.tensor) if team.tensor.size > 1 else whole
    return dict(mine.state_dict())
