"""``troupe build-engine``: export a model's step, build or load its engine files, and report their contents.

TensorRT's engine inspector needs a GPU. Engine files of TensorRT-RTX 1.7 contain their program as text, in an
undocumented format. Its instructions are counted here for diagnostics.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from engines.core.model import Branch, DenoiserModel
from engines.parallel.mesh import Team
from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.builder import BuildOptions, Shape, check_target, explain_build_errors
from engines.tensorrt_engine.build.caches import CachedEngine, EngineCache, cached_engine
from engines.tensorrt_engine.build.progress import spinner
from engines.tensorrt_engine.config import ResolvedConfig, TensorRTConfig
from engines.tensorrt_engine.export.buckets import shared_branches
from engines.tensorrt_engine.export.exported import EngineExport
from engines.tensorrt_engine.export.exporter import Exporter, change_for
from engines.tensorrt_engine.export.graph import EngineGraph
from engines.tensorrt_engine.export.trace import offline_team

MIB = 1 << 20

_PROGRAM_START = b"header {\n  version = 5"
_PROGRAM_ENDS = (b"#undef __HAS", b"header {\n  version = 4")
_INSTRUCTION = re.compile(r"^\s+([a-z_0-9]+)=\{ name=\"?([^\"\s]+)\"?", re.MULTILINE)
_NOT_INSTRUCTIONS = ("region", "tensor", "parameter", "symbol")
_COLLECTIVES = {
    "comm_alltoall": "all_to_all",
    "comm_allgather": "all_gather",
    "comm_allreduce": "all_reduce",
    "comm_reduce_scatter": "reduce_scatter",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Contents of one engine file, for people."""

    title: str
    """Strategy, team, precision, GPU and TensorRT version."""
    collectives: dict[str, int]
    """Number of each operation in the graph, or in the built program where it can be read."""
    num_attentions: int
    """Attentions in the graph."""
    num_fused_attentions: int | None
    """Attentions that the program fuses; None if it cannot be read."""
    inputs: tuple[str, ...]
    """Name, type and shape of each input that is no weight."""
    num_weight_inputs: int
    """Weights that are inputs; 0: they are constants of the file."""
    graph_bytes: int
    """Size of the ONNX graph."""
    engine_bytes: int
    """Size of the engine file."""
    export_s: float
    """Seconds of the export of all graphs."""
    build_s: float
    """Seconds of the build, now or when the file was made."""
    was_cached: bool
    """True if the file was found in the cache."""
    path: str
    """Path of the file."""
    sha256: str
    """SHA-256 of its bytes."""

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        exchanges = ", ".join(f"{number} {name}" for name, number in sorted(self.collectives.items())) or "none"
        fused = "unknown" if self.num_fused_attentions is None else str(self.num_fused_attentions)
        origin = "found in the cache, built in" if self.was_cached else "built in"
        return [
            self.title,
            f"  collectives   {exchanges}",
            f"  attentions    {self.num_attentions}, fused: {fused}",
            f"  inputs        {', '.join(self.inputs)}",
            f"  weights       {self.num_weight_inputs} inputs"
            if self.num_weight_inputs
            else "  weights       constants",
            f"  sizes         graph {self.graph_bytes / MIB:.1f} MiB, engine file {self.engine_bytes / MIB:.1f} MiB",
            f"  time          exported in {self.export_s:.1f} s, {origin} {self.build_s:.1f} s",
            f"  engine file   {self.path}",
        ]


def build_engine(
    model: DenoiserModel,
    buckets: Sequence[Branch],
    *,
    config: TensorRTConfig,
    num_ranks: int,
    target: Target,
    weight_streaming: bool = False,
    strip_weights: bool = False,
    visible: bool = True,
) -> list[EngineReport]:
    """Return reports of the engine files for ``num_ranks`` ranks: one per module, or one per kind of segment.

    An engine has segments if a ring runs in torch. One branch of a module gives static shapes. Several give one engine
    file that covers all their shapes, tuned for the first. No process group may exist, since torch's fake one replaces
    the other ranks. TensorRT-RTX needs no GPU.
    Raises ValueError for what TensorRT does not support, BuildError, BuildCancelledError after Ctrl-C.
    """
    check_target(target)
    resolved = config.resolve(model, num_ranks, target)
    exporter = Exporter(
        model=model,
        weights_as_inputs=config.weights == "inputs",
        change=lambda name: change_for(model, name, config.precision, config.cache_dir),
        native_ring=resolved.ring == "native",
    )
    started_s = time.perf_counter()
    with offline_team(resolved.spec) as team, spinner("exporting", visible=visible):
        graphs = _export(exporter, buckets, team)
    export_s = time.perf_counter() - started_s
    options = BuildOptions(
        target=target, weight_streaming=weight_streaming, strip_weights=strip_weights, timing_cache_dir=config.cache_dir
    )
    cache = EngineCache(config.cache_dir)
    named = {"strategy": resolved.spec.name, "precision": resolved.precision}
    with explain_build_errors(model, resolved.spec.name):
        engines = [cached_engine(graph, options, cache, **named, visible=visible) for graph in graphs]
    return [_report(graph, resolved, engine, export_s) for graph, engine in zip(graphs, engines, strict=True)]


def _export(exporter: Exporter, buckets: Sequence[Branch], team: Team) -> list[EngineGraph]:
    """Return the distinct graphs: two transformers of one class share engine files if weights are inputs."""
    modules = dict.fromkeys(bucket.module for bucket in buckets)
    exports = [export for module in modules for export in _export_module(exporter, buckets, module, team)]
    graphs = [graph for exported in exports for graph in exported.graphs]
    return list({graph.serialized(): graph for graph in graphs}.values())


def _export_module(exporter: Exporter, buckets: Sequence[Branch], module: str, team: Team) -> list[EngineExport]:
    """Return one export for all sizes that share an engine, and one for each other size, like ``TensorRTEngine``."""
    branches = [branch for branch in buckets if branch.module == module]
    shared = [] if exporter.is_segmented(team) else shared_branches(exporter.model, branches, team)
    rest = [branch for branch in branches if all(branch is not each for each in shared)]
    return [exporter.export(each, team) for each in ([shared] if shared else []) + [[branch] for branch in rest]]


def _report(graph: EngineGraph, resolved: ResolvedConfig, engine: CachedEngine, export_s: float) -> EngineReport:
    text = read_engine_text(engine.engine_file)
    title = f"{resolved.spec.name}, {graph.num_ranks} ranks, {resolved.precision}, {resolved.target.name}"
    return EngineReport(
        title=f"{title}, {engine.key.product} {engine.key.version}",
        collectives=graph.collectives() if text is None else text.collectives,
        num_attentions=graph.num_attentions(),
        num_fused_attentions=None if text is None else text.num_fused_attentions,
        inputs=tuple(_describe_input(value, graph) for value in graph.model.graph.inputs if value.name in graph.inputs),
        num_weight_inputs=len(graph.weights),
        graph_bytes=len(graph.serialized()),
        engine_bytes=len(engine.engine_file),
        export_s=export_s,
        build_s=engine.build_s,
        was_cached=engine.was_cached,
        path=str(engine.path),
        sha256=engine.sha256,
    )


def _describe_input(value: ir.Value, graph: EngineGraph) -> str:
    """Return name, dims and dtype; a varying dim as a range of sizes."""
    profiles = [profile.shapes[str(value.name)] for profile in graph.profiles if value.name in profile.shapes]
    dims = _range(profiles[0]) if profiles else [str(dim) for dim in value.shape or ("?",)]
    return f"{value.name} {'×'.join(dims)} {value.dtype.name if value.dtype else ''}".rstrip()


def _range(shapes: tuple[Shape, Shape, Shape]) -> list[str]:
    smallest, _, largest = shapes
    return [str(low) if low == high else f"{low}–{high}" for low, high in zip(smallest, largest, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineText:
    """Counts over the whole program of an engine file."""

    collectives: dict[str, int]
    """Instructions by operation."""
    num_fused_attentions: int
    """Instructions of fused attention."""


def read_engine_text(engine_file: bytes) -> EngineText | None:
    """Return counts of the file's instructions; None if it has no program text of the expected version."""
    start = engine_file.find(_PROGRAM_START)
    if start < 0:
        return None
    ends = [end for mark in _PROGRAM_ENDS if (end := engine_file.find(mark, start + 1)) > 0]
    text = engine_file[start : min(ends, default=len(engine_file))].decode("latin1")
    names = [(kind, name) for kind, name in _INSTRUCTION.findall(text) if kind not in _NOT_INSTRUCTIONS]
    kinds = Counter(kind for kind, _ in names)
    return EngineText(
        collectives={_COLLECTIVES.get(k, k): n for k, n in kinds.items() if k.startswith("comm_")},
        num_fused_attentions=sum("mha" in name for _, name in names),
    )
