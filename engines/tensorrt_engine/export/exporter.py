"""Exports for an engine, from the cache if possible: whole or in segments, for one size or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import scheme_of
from engines.core.tensors import fingerprint
from engines.parallel.mesh import Team
from engines.quantization.onnx import Quantization, quantization
from engines.tensorrt_engine.build.export_cache import ExportCache, export_key
from engines.tensorrt_engine.config import RingForm
from engines.tensorrt_engine.export.buckets import profile_over, varying_dims
from engines.tensorrt_engine.export.exported import EngineExport, export, export_segments, rank_weights
from engines.tensorrt_engine.export.trace import ChangeModule, unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """Exports branches of one model."""

    model: DenoiserModel
    """The transformers and their plan."""
    weights_as_inputs: bool = True
    """True if weights are inputs of the graph; else they are constants."""
    change: Callable[[str], ChangeModule] = lambda name: unchanged
    """``change(module name)`` returns the function that changes the module before its export (quantisation)."""
    native_ring: bool = False
    """True if TensorRT runs a ring; otherwise it runs in torch, between segments of the engine."""
    cache: ExportCache | None = None
    """Cache of exports for later starts; None: there is none."""

    def export(self, branches: Sequence[Branch], team: Team) -> EngineExport:
        """Export one branch with static shapes, or several as one graph with a profile, tuned for the first.

        Collective over the team. ValueError for what TensorRT does not support.
        """
        try:
            return self._cached_export(branches, team)
        except ValueError as error:
            raise ValueError(f"{self.model.class_name} in TensorRT: {error}") from error

    def _cached_export(self, branches: Sequence[Branch], team: Team) -> EngineExport:
        change = self.change(branches[0].module)
        cacheable = change is unchanged or isinstance(change, Quantization)
        if self.cache is None or not cacheable:
            return self._export(branches, team, change)
        weights = rank_weights(self.model, branches[0].module, team)
        device = next(iter(weights.values())).device
        key = self._key(tuple(branches), team, change)
        return self.cache.get_or_export(key, weights, device, lambda: self._export(branches, team, change))

    def is_segmented(self, team: Team) -> bool:
        """Return whether the engine has segments, with a ring in torch between them."""
        return team.spec.ring > 1 and team.spec.ulysses == 1 and not self.native_ring

    def _export(self, branches: Sequence[Branch], team: Team, change: ChangeModule) -> EngineExport:
        first = branches[0]
        if self.is_segmented(team):
            assert len(branches) == 1, "segments of an engine have fixed shapes"
            return export_segments(self.model, first, team, change=change)
        dynamic = varying_dims([branch.inputs for branch in branches]) or None
        ring: RingForm = "native" if self.native_ring else "none"
        as_inputs = self.weights_as_inputs
        exported = export(
            self.model, first, team, weights_as_inputs=as_inputs, dynamic=dynamic, change=change, ring=ring
        )
        if dynamic is None:
            return exported
        profile = profile_over(exported, [branch.inputs for branch in branches])
        return dataclasses.replace(exported, graphs=(dataclasses.replace(exported.graph, profiles=(profile,)),))

    def _key(self, branches: tuple[Branch, ...], team: Team, change: ChangeModule) -> str:
        holds_values = change is not unchanged or not self.weights_as_inputs  # the graph contains values of weights
        return export_key(
            self.model,
            branches,
            team,
            weights="inputs" if self.weights_as_inputs else "constants",
            ring="native" if self.native_ring else "torch",
            change=change.digest() if isinstance(change, Quantization) else "",
            values=fingerprint(self.model.modules[branches[0].module]) if holds_values else "",
        )


def change_for(model: DenoiserModel, name: str, precision: str, folder: Path) -> ChangeModule:
    """Return the change of module ``name`` before its trace. ValueError if it lacks its calibration."""
    scheme = scheme_of(precision)
    return quantization(model, name, scheme, folder) if scheme else unchanged
