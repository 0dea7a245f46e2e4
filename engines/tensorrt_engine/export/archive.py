"""An export as one file: ONNX graphs, the torch parts around them as JSON, and the constants of these parts.

The file contains no code. Weights that are inputs of the engine are not in it, but bound by name at reading.
``torch.export.save`` would trace the torch parts again and store their weights. Reading its files takes more than ten
times as long, on every rank at every start.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import math
import operator
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import onnx
import onnx_ir as ir
import torch
from safetensors.torch import load, save
from torch import Tensor, fx, nn

from engines.core.torch_private import is_operator
from engines.tensorrt_engine.build.builder import Profile, Shape
from engines.tensorrt_engine.export.exported import EngineExport
from engines.tensorrt_engine.export.graph import WEIGHT_PREFIX, EngineGraph
from engines.tensorrt_engine.export.segments import Segment
from engines.tensorrt_engine.export.subgraph import tensors_of

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
_FUNCTIONS = {module.__name__: module for module in (operator, math, torch)}
_OWN_OPERATORS = ("engines.tensorrt_engine.export.markers", "engines.quantization.onnx")
"""Modules that register custom operators which a graph may contain."""

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def write_export(exported: EngineExport) -> bytes:
    """Return the file's bytes, equal for equal exports. ValueError for a graph that cannot be serialised."""
    parts = (exported.prologue, exported.epilogue)
    tensors = {name: tensor for part in parts for name, tensor in tensors_of(part, part.graph).items()}
    record = {
        "prologue": _write_graph(exported.prologue.graph),
        "epilogue": _write_graph(exported.epilogue.graph),
        "prologue_outputs": exported.prologue_outputs,
        "epilogue_inputs": exported.epilogue_inputs,
        "weights": sorted(name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)),
        "graphs": [_graph_record(graph) for graph in exported.graphs],
        "segments": [dataclasses.asdict(segment) for segment in exported.segments],
    }
    constants = {n: t.detach().cpu().contiguous() for n, t in tensors.items() if not isinstance(t, nn.Parameter)}
    members = {"export.json": json.dumps(record).encode(), "constants.safetensors": save(constants)}
    members |= {f"{index}.onnx": graph.serialized() for index, graph in enumerate(exported.graphs)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, _FIXED_TIME), data)
    return buffer.getvalue()


def read_export(data: bytes, weights: Mapping[str, Tensor], device: torch.device) -> EngineExport:
    """Read the file; ``weights`` by ``state_dict`` key. Damage is ValueError, KeyError or ``zipfile.BadZipFile``."""
    members = _members(data)
    record: dict[str, Any] = json.loads(members["export.json"])
    constants = load(members["constants.safetensors"])
    onnx_files = [members[f"{index}.onnx"] for index in range(len(record["graphs"]))]
    tensors = {name: tensor.to(device) for name, tensor in constants.items()}
    tensors |= {name: _parameter(weights[name.removeprefix(WEIGHT_PREFIX)]) for name in record["weights"]}
    return EngineExport(
        graphs=tuple(_graph(*pair) for pair in zip(record["graphs"], onnx_files, strict=True)),
        prologue=_read_graph(record["prologue"], tensors),
        epilogue=_read_graph(record["epilogue"], tensors),
        prologue_outputs=tuple(record["prologue_outputs"]),
        epilogue_inputs=tuple(record["epilogue_inputs"]),
        segments=tuple(_segment(segment) for segment in record["segments"]),
    )


def _members(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # checks the CRC of each member
            return {name: archive.read(name) for name in archive.namelist()}
    except (RuntimeError, zlib.error) as error:  # damaged headers of members
        raise ValueError(f"a member of the archive cannot be read: {error}") from error


def _parameter(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _graph_record(graph: EngineGraph) -> dict[str, Any]:
    plain = {name: getattr(graph, name) for name in ("inputs", "weights", "outputs", "num_ranks")}
    return plain | {"profiles": [dict(profile.shapes) for profile in graph.profiles]}


def _graph(record: dict[str, Any], onnx_file: bytes) -> EngineGraph:
    return EngineGraph(
        model=ir.from_proto(onnx.load_from_string(onnx_file)),
        inputs=tuple(record["inputs"]),
        weights=tuple(record["weights"]),
        outputs=tuple(record["outputs"]),
        num_ranks=record["num_ranks"],
        profiles=tuple(_profile(shapes_of) for shapes_of in record["profiles"]),
    )


def _profile(shapes_of: Mapping[str, list[list[int]]]) -> Profile:
    def three(shapes: list[list[int]]) -> tuple[Shape, Shape, Shape]:
        smallest, likely, largest = map(tuple, shapes)
        return smallest, likely, largest

    return Profile(shapes={name: three(shapes) for name, shapes in shapes_of.items()})


def _segment(record: dict[str, Any]) -> Segment:
    attention = record["attention"]
    return Segment(
        kind=record["kind"],
        inputs=tuple(record["inputs"]),
        weights=record["weights"],
        outputs=tuple(record["outputs"]),
        attention=None if attention is None else tuple(attention),
    )


def _write_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return one record per node. ValueError for an argument or a function that cannot be serialised."""
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


def _read_graph(records: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """Return the graph of ``records``, with its ``get_attr`` nodes bound to ``tensors`` by name."""
    for module in _OWN_OPERATORS:
        importlib.import_module(module)
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for record in records:
        target = _read_target(record["op"], record["target"])
        args, kwargs = _read(record["args"], nodes), _read(record["kwargs"], nodes)
        nodes[record["name"]] = graph.create_node(record["op"], target, args, kwargs, record["name"])
    return fx.GraphModule(dict(tensors), graph)


def _write_target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if is_operator(node.target):
        return f"torch.ops.{node.target}"
    name = str(getattr(node.target, "__name__", node.target))
    home = str(getattr(node.target, "__module__", "")).lstrip("_")
    if home not in _FUNCTIONS or getattr(_FUNCTIONS[home], name, None) is not node.target:
        raise ValueError(f"the function {home}.{name} cannot be serialised")
    return f"{home}.{name}"


def _read_target(op: str, target: str) -> str | Callable[..., Any]:
    if op != "call_function":
        return target
    if target.startswith("torch.ops."):
        function = operator.attrgetter(target.removeprefix("torch."))(torch)
    else:
        home, _, name = target.rpartition(".")
        function = getattr(_FUNCTIONS[home], name)
    assert callable(function), target
    return cast("Callable[..., Any]", function)


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
    raise ValueError(f"an argument of type {type(value).__name__} cannot be serialised")


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
    constant = getattr(torch, inside)
    assert isinstance(constant, _TORCH_CONSTANTS), inside
    return constant
