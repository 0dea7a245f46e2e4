"""Parts of a traced graph as modules of their own, with just the tensors they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from engines.tensorrt_engine.export.markers import CUT
from engines.tensorrt_engine.export.symbolic import Sizes

RANK = "rank_index"
"""Name of the extra input of ``before``: the caller's place on the context axis."""


def input_name(placeholder: fx.Node) -> str:
    """The model input's name: ``torch.export`` puts the name of the dict of inputs in front."""
    return placeholder.name.removeprefix("inputs_")


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def extract(
    traced: fx.GraphModule, given: list[fx.Node], part: list[fx.Node], results: list[fx.Node], *, rank: bool = False
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in given:
        copies[node] = graph.placeholder(input_name(node))
        copies[node].meta = dict(node.meta)
    index = graph.placeholder(RANK) if rank else None
    sizes = Sizes(graph, [(node, copies[node]) for node in given if not is_size(node)])
    for node in part:
        for source in node.all_input_nodes:
            if source not in copies:
                copies[source] = graph.node_copy(source) if source.op == "get_attr" else sizes.node(source.meta["val"])
        copies[node] = _copy(graph, node, copies)
        if node.target is CUT and index is not None:
            copies[node].args = (*copies[node].args[:4], index)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(_only_used(traced, graph), graph)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, Any]) -> fx.Node:
    """Like ``graph.node_copy``, but a source may have become a plain number."""
    assert node.op == "call_function", node.op
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: copies[source])
    made = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    made.meta = dict(node.meta)
    return made


def _only_used(traced: fx.GraphModule, graph: fx.Graph) -> nn.Module:
    """A root that holds just the tensors that ``graph`` reads, under their names."""
    root = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            *path, leaf = str(node.target).split(".")
            owner: nn.Module = root
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            value = resolve(traced, str(node.target))
            if isinstance(value, nn.Parameter):
                owner.register_parameter(leaf, value)
            else:
                owner.register_buffer(leaf, value)
    return root


def resolve(root: nn.Module, name: str) -> torch.Tensor:
    value: object = root
    for step in name.split("."):
        value = getattr(value, step)
    assert isinstance(value, torch.Tensor), name
    return value
