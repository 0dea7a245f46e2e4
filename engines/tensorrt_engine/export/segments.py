"""A core graph cut at its attentions, for a ring that runs in torch between the segments.

Blocks of one type give segments of one kind: with weights as inputs they share an engine file. 57 attentions of two
types leave 58 segments of 5 kinds (start, first type, from the first to the second, second type, end).
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
    """Marks where a rank's queries, keys and values leave the engine; it is never run."""
    raise NotImplementedError("troupe::attend only marks a place in a traced graph")


@attend.register_fake
def _(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
    return torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)


ATTEND = torch.ops.troupe.attend.default


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One segment: ``kind`` is the index of its graph; values and weights by name, in the order of the graph's own.

    ``attention`` names the queries, keys, values and result of the attention that follows; None after the last segment.
    """

    kind: int
    inputs: tuple[str, ...]
    weights: Mapping[str, str]
    outputs: tuple[str, ...]
    attention: tuple[str, str, str, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _TracedSegment:
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attention: tuple[str, str, str, str] | None


def segment_core(parts: Parts, num_ranks: int) -> tuple[tuple[Segment, ...], tuple[EngineGraph, ...]]:
    """Returns the segments of ``parts.core`` in running order, and a graph for each kind of them."""
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
    """Returns ``traced`` as an instance of ``graph``, which was made of ``first``.

    A value of which the graph uses the dtype alone is no input.
    """
    named = zip(_numbered("in", traced.inputs), traced.inputs, strict=True)
    return Segment(
        kind=kind,
        inputs=tuple(name for own, name in named if own in graph.inputs),
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
    return [_extracted(parts.core, part, names, attend) for part, attend in zip(members, [*attends, None], strict=True)]


def _extracted(
    core: fx.GraphModule, part: list[fx.Node], names: Mapping[fx.Node, str], attention: fx.Node | None
) -> _TracedSegment:
    inside = set(part)
    outside = list(dict.fromkeys(s for n in part for s in n.all_input_nodes if s not in inside and s.op != "get_attr"))
    results = [n for n in part if not inside.issuperset(n.users)]
    around: tuple[str, ...] | None = None
    if attention is not None:
        around = tuple(_named(node, names) for node in (*attention.args, attention))  # type: ignore[arg-type]
    return _TracedSegment(
        graph=extract(core, outside, part, results),
        inputs=tuple(_named(n, names) for n in outside),
        outputs=tuple(_named(n, names) for n in results),
        attention=around,  # type: ignore[arg-type]
    )


def _named(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    return names.get(node, f"value {node.name}")


def _stages(nodes: list[fx.Node], attends: list[fx.Node]) -> dict[fx.Node, int]:
    """Returns each node's stage: as late as possible, so that a block's own work (modulation, above all) lies in its
    own segments. But what more than two segments need (the text of cross-attention) is made in the first.
    """
    order = {node: index for index, node in enumerate(attends)}
    stages: dict[fx.Node, int] = {}
    depends = downstream(attends)
    for node in reversed(nodes):
        if node.op == "call_function" and node not in order:
            users = [order[user] if user in order else stages[user] for user in node.users if user.op != "output"]
            shared = node not in depends and bool(users) and max(users) - min(users) > 1
            stages[node] = 0 if shared else min(users, default=len(attends))
    for node in nodes:
        if node.target is operator.getitem:  # a tensor may go from segment to segment, a list of them may not
            stages[node] = stages[node.all_input_nodes[0]]
    return stages


def _weights(graph: fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in graph.graph.nodes if node.op == "get_attr")
    return [name.removeprefix(WEIGHT_PREFIX) for name in names]


def _structure(graph: fx.GraphModule) -> str:
    """Returns the graph without its names: equal for blocks of one type."""
    index: dict[fx.Node, int] = {}
    lines = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            value = graph.get_parameter(str(node.target)) if _is_parameter(graph, str(node.target)) else node.target
        what = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)
        args = fx.map_arg((node.args, node.kwargs), lambda source: f"%{index[source]}")
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args} {what}")
        index[node] = len(index)
    return "\n".join(lines)


def _is_parameter(graph: fx.GraphModule, name: str) -> bool:
    return name in dict(graph.named_parameters())
