"""Segments of a core graph between its attentions, for a ring that runs in torch between them.

Blocks of one type give segments of one kind, which share an engine file with weights as inputs. With 57 attentions of
two types there are 58 segments of 5 kinds: start, first type, between the types, second type, end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from engines.tensorrt_engine.export.graph import WEIGHT_PREFIX, EngineGraph, export_graph
from engines.tensorrt_engine.export.partition import Parts, downstream
from engines.tensorrt_engine.export.subgraph import extract


@torch.library.custom_op("troupe::attend", mutates_args=())
def attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    """Mark where a rank's queries, keys and values leave the engine. It never runs."""
    raise NotImplementedError("troupe::attend only marks a place in a traced graph")


@attend.register_fake
def _(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)


ATTEND = torch.ops.troupe.attend.default


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One segment as an instance of its kind's graph."""

    kind: int
    """Index of the graph."""
    inputs: tuple[str, ...]
    """Names of values, in the order of the graph's own inputs."""
    weights: Mapping[str, str]
    """The graph's weight names to the segment's."""
    outputs: tuple[str, ...]
    """Names of values, in the order of the graph's own outputs."""
    attention: tuple[str, str, str, str] | None
    """Names of queries, keys, values and result of the next attention; None for the last segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TracedSegment:
    """A segment of one trace, before equal ones share a graph."""

    graph: fx.GraphModule
    """Graph of its computation."""
    inputs: tuple[str, ...]
    """Names of values, in order."""
    outputs: tuple[str, ...]
    """Names of values, in order."""
    attention: tuple[str, str, str, str] | None
    """See ``Segment.attention``."""


def segment_core(parts: Parts, num_ranks: int) -> tuple[tuple[Segment, ...], tuple[EngineGraph, ...]]:
    """Return the segments of ``parts.core`` in running order, and one graph per kind."""
    first_of: dict[str, tuple[int, _TracedSegment]] = {}
    kinds: list[EngineGraph] = []
    segments = []
    for traced in _traced_segments(parts):
        structure = _structure(traced.graph)
        if structure not in first_of:
            first_of[structure] = len(kinds), traced
            inputs, outputs = _numbered("in", traced.inputs), _numbered("out", traced.outputs)
            kinds.append(export_graph(traced.graph, inputs, outputs, num_ranks))
        kind, first = first_of[structure]
        segments.append(_segment(traced, first, kind, kinds[kind]))
    return tuple(segments), tuple(kinds)


def _segment(traced: _TracedSegment, first: _TracedSegment, kind: int, graph: EngineGraph) -> Segment:
    """Return ``traced`` as an instance of ``graph``, which was exported from ``first``.

    A value of which the graph uses only the dtype is no input.
    """
    pairs = zip(_numbered("in", traced.inputs), traced.inputs, strict=True)
    return Segment(
        kind=kind,
        inputs=tuple(name for own, name in pairs if own in graph.inputs),
        weights=dict(zip(_weights(first.graph), _weights(traced.graph), strict=True)),
        outputs=traced.outputs,
        attention=traced.attention,
    )


def _numbered(what: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{what}.{index}" for index in range(len(names)))


def _traced_segments(parts: Parts) -> list[_TracedSegment]:
    nodes = list(parts.core.graph.nodes)
    results = list(next(node for node in nodes if node.op == "output").args[0])
    attends = [node for node in nodes if node.target is ATTEND]
    inputs = [node for node in nodes if node.op == "placeholder"]
    names = dict(zip([*inputs, *results], [*parts.core_inputs, *parts.core_outputs], strict=True))
    stages = _stages(nodes, attends)
    members = [[n for n in nodes if stages.get(n) == stage] for stage in range(len(attends) + 1)]
    pairs = zip(members, [*attends, None], strict=True)
    return [_extract_segment(parts.core, part, names, attend) for part, attend in pairs]


def _extract_segment(
    core: fx.GraphModule, part: list[fx.Node], names: Mapping[fx.Node, str], attention: fx.Node | None
) -> _TracedSegment:
    inside = set(part)
    outside = list(dict.fromkeys(s for n in part for s in n.all_input_nodes if s not in inside and s.op != "get_attr"))
    results = [n for n in part if not inside.issuperset(n.users)]
    qkv_out: tuple[str, ...] | None = None
    if attention is not None:
        qkv_out = tuple(_value_name(node, names) for node in (*attention.args, attention))  # type: ignore[arg-type]
    return _TracedSegment(
        graph=extract(core, outside, part, results),
        inputs=tuple(_value_name(n, names) for n in outside),
        outputs=tuple(_value_name(n, names) for n in results),
        attention=qkv_out,  # type: ignore[arg-type]
    )


def _value_name(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    return names.get(node, f"value {node.name}")


def _stages(nodes: list[fx.Node], attends: list[fx.Node]) -> dict[fx.Node, int]:
    """Return each node's stage: as late as possible, so that segments contain their own work, such as modulation."""
    order = {node: index for index, node in enumerate(attends)}
    stages: dict[fx.Node, int] = {}
    depends = downstream(attends)
    for node in reversed(nodes):
        if node.op == "call_function" and node not in order:
            users = [order[user] if user in order else stages[user] for user in node.users if user.op != "output"]
            shared = node not in depends and bool(users) and max(users) - min(users) > 1  # text of cross-attention
            stages[node] = 0 if shared else min(users, default=len(attends))
    for node in nodes:
        if node.target is operator.getitem:  # segments exchange tensors, not lists
            stages[node] = stages[node.all_input_nodes[0]]
    return stages


def _weights(graph: fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in graph.graph.nodes if node.op == "get_attr")
    return [name.removeprefix(WEIGHT_PREFIX) for name in names]


def _structure(graph: fx.GraphModule) -> str:
    """Return the graph as text without names, equal for blocks of one type."""
    index: dict[fx.Node, int] = {}
    lines = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            value = dict(graph.named_parameters()).get(str(node.target), node.target)
        what = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)
        args = fx.map_arg((node.args, node.kwargs), lambda source: f"%{index[source]}")
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args} {what}")
        index[node] = len(index)
    return "\n".join(lines)
