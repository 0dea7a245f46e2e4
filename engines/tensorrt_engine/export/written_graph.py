"""A traced graph as JSON and back: nothing in the file is code, so reading one runs nothing that is not torch's."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from engines.tensorrt_engine.export.subgraph import resolve

_FUNCTIONS = {module.__name__: module for module in (operator, math, torch)}
_OWN_OPERATORS = ("engines.tensorrt_engine.export.markers", "engines.quantization.onnx")
"""Modules that register the operators a graph may name besides torch's."""

_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def write_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """One record a node. ValueError for an argument or a function that has no written form."""
    return [
        {
            "name": node.name,
            "op": node.op,
            "target": _write_target(node),
            "args": _write(node.args),
            "kwargs": _write(dict(node.kwargs)),
        }
        for node in graph.nodes
    ]


def read_graph(records: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """The graph again, its ``get_attr`` nodes bound to ``tensors`` by name."""
    for module in _OWN_OPERATORS:
        importlib.import_module(module)
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for record in records:
        target = _read_target(record["op"], record["target"])
        args, kwargs = _read(record["args"], nodes), _read(record["kwargs"], nodes)
        nodes[record["name"]] = graph.create_node(record["op"], target, args, kwargs, record["name"])
    return fx.GraphModule(_root_with({name: tensors[name] for name in set(_names(records))}), graph)


def graph_tensors(module: fx.GraphModule) -> dict[str, Tensor]:
    """What the graph's ``get_attr`` nodes name."""
    names = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
    return {name: resolve(module, name) for name in names}


def _names(records: list[dict[str, Any]]) -> Iterator[str]:
    return (record["target"] for record in records if record["op"] == "get_attr")


def _root_with(tensors: Mapping[str, Tensor]) -> nn.Module:
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
    return root


def _write_target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    name = str(getattr(node.target, "__name__", node.target))
    home = str(getattr(node.target, "__module__", "")).lstrip("_")
    if home not in _FUNCTIONS or getattr(_FUNCTIONS[home], name, None) is not node.target:
        raise ValueError(f"{home}.{name} has no written form")
    return f"{home}.{name}"


def _read_target(op: str, target: str) -> str | Callable[..., Any]:
    if op != "call_function":
        return target
    found: Any
    if target.startswith("torch.ops."):
        namespace, packet, overload = target.removeprefix("torch.ops.").split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    else:
        home, _, name = target.rpartition(".")
        found = getattr(_FUNCTIONS[home], name)
    function: Callable[..., Any] = found
    return function


def _write(value: Any) -> Any:
    match value:
        case fx.Node():
            return {"node": value.name}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return {type(value).__name__.removeprefix("immutable_"): [_write(item) for item in value]}
        case dict():
            return {"dict": {name: _write(item) for name, item in value.items()}}
        case slice():
            return {"slice": [_write(item) for item in (value.start, value.stop, value.step)]}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
    raise ValueError(f"an argument of type {type(value).__name__} has no written form")


def _read(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    match kind:
        case "node":
            return nodes[inside]
        case "list":
            return [_read(item, nodes) for item in inside]
        case "tuple":
            return tuple(_read(item, nodes) for item in inside)
        case "dict":
            return {name: _read(item, nodes) for name, item in inside.items()}
        case "slice":
            return slice(*(_read(item, nodes) for item in inside))
        case "device":
            return torch.device(inside)
    found = getattr(torch, inside)
    assert isinstance(found, _OF_TORCH), inside
    return found
