"""Parts of a traced graph as modules of their own, with just the tensors they read.

``torch.fx.passes.split_module`` would make weights, and sizes that vary, inputs of each part.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from engines.tensorrt_engine.export.parts.markers import CUT
from engines.tensorrt_engine.export.parts.symbolic import Sizes

RANK = "rank_index"
"""Name of the extra input of a prologue: the caller's place among those that share tokens or weights."""


def input_name(placeholder: fx.Node) -> str:
    """Returns the model input's name: ``torch.export`` puts the name of the dict of inputs in front."""
    return placeholder.name.removeprefix("inputs_")


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def extract(
    traced: fx.GraphModule, inputs: list[fx.Node], part: list[fx.Node], results: list[fx.Node], *, rank: bool = False
) -> fx.GraphModule:
    """Returns the nodes ``part`` as a module that takes ``inputs`` (and the rank's index) and gives ``results``."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in inputs:
        copies[node] = graph.placeholder(input_name(node))
        copies[node].meta = dict(node.meta)
    index = graph.placeholder(RANK) if rank else None
    sizes = Sizes(graph, [(node, copies[node]) for node in inputs if not is_size(node)])
    for node in part:
        for source in node.all_input_nodes:
            if source not in copies:
                copies[source] = graph.node_copy(source) if source.op == "get_attr" else sizes.node(source.meta["val"])
        copies[node] = _copy(graph, node, copies)
        if node.target is CUT and index is not None:
            copies[node].args = (*copies[node].args[:4], index)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(tensors_of(traced, graph), graph)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any]) -> fx.Node:
    """Copies as ``graph.node_copy`` does, but a source may have become a plain number."""
    assert node.op == "call_function", node.op
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: copies[source])
    copied = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    copied.meta = dict(node.meta)
    return copied


def tensors_of(root: nn.Module, graph: fx.Graph) -> dict[str, Tensor]:
    """Returns the tensors of ``root`` that ``graph`` reads, by the names of its ``get_attr`` nodes."""
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    return {name: resolve(root, name) for name in names}


def resolve(root: nn.Module, name: str) -> Tensor:
    tensor = operator.attrgetter(name)(root)
    assert isinstance(tensor, Tensor), name
    return tensor
