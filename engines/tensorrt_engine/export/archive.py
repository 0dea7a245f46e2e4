"""An exported engine as one file: ONNX graphs, the torch parts around them as JSON, and the constants these hold.

Weights are not in it (unless the engine has them as constants): they are bound by name when the file is read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from engines.tensorrt_engine.build.builder import Profile, Shape
from engines.tensorrt_engine.export.exported import Exported
from engines.tensorrt_engine.export.onnx_graph import WEIGHT_PREFIX, EngineGraph
from engines.tensorrt_engine.export.segments import Segment
from engines.tensorrt_engine.export.written_graph import graph_tensors, read_graph, write_graph

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


def write_export(exported: Exported) -> bytes:
    """The file's bytes; equal exports give equal bytes. ValueError for a graph that has no written form."""
    tensors = graph_tensors(exported.before) | graph_tensors(exported.after)
    record = {
        "before": write_graph(exported.before.graph),
        "after": write_graph(exported.after.graph),
        "handed": exported.handed,
        "after_inputs": exported.after_inputs,
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


def read_export(data: bytes, weights: Mapping[str, Tensor], device: torch.device) -> Exported:
    """``weights`` by ``state_dict`` key. Raises ValueError or ``zipfile.BadZipFile`` for a damaged file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # checks each member's CRC as it is read
        record: dict[str, Any] = json.loads(archive.read("export.json"))
        constants = load(archive.read("constants.safetensors"))
        onnx_files = [archive.read(f"{index}.onnx") for index in range(len(record["graphs"]))]
    tensors = {name: tensor.to(device) for name, tensor in constants.items()}
    tensors |= {name: _parameter(weights[name.removeprefix(WEIGHT_PREFIX)]) for name in record["weights"]}
    return Exported(
        graphs=tuple(_graph(*pair) for pair in zip(record["graphs"], onnx_files, strict=True)),
        before=read_graph(record["before"], tensors),
        after=read_graph(record["after"], tensors),
        handed=tuple(record["handed"]),
        after_inputs=tuple(record["after_inputs"]),
        segments=tuple(_segment(segment) for segment in record["segments"]),
    )


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
        form=record["form"],
        inputs=tuple(record["inputs"]),
        weights=record["weights"],
        outputs=tuple(record["outputs"]),
        attention=None if attention is None else tuple(attention),
    )
