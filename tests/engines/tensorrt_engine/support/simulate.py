"""Run one engine graph for all its ranks in onnxruntime on the CPU: TensorRT's arithmetic, checked without a GPU.

The graph is cut at its collectives into stages. Every stage is one session that runs for each rank in turn; between
stages ``Collective.apply`` runs the collectives. bfloat16 is out of reach: onnxruntime has no CPU kernels for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime
from onnx import helper

from engines.tensorrt_engine.export.collectives import DOMAIN, FUSED_ONLY, Array, Collective, register_schema
from tests.engines.tensorrt_engine.support.collective_nodes import is_collective, read_collective

Values = Mapping[str, Array]
MASK = 3
"""Index of the mask among the inputs of ``Attention``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Nodes between two rounds of collectives, then the round: (what, source, result) each."""

    session: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    exchanges: tuple[tuple[Collective, str, str], ...]


class Simulator:
    """Runs one graph for all its ranks."""

    def __init__(self, model: onnx.ModelProto | bytes, *, num_threads: int = 1) -> None:
        model = onnx.load_from_string(model) if isinstance(model, bytes) else model
        self._outputs = tuple(output.name for output in model.graph.output)
        self.inputs = tuple(value.name for value in model.graph.input)
        self._stages = list(cut_at_collectives(model, num_threads))

    def run(self, feeds: Sequence[Values], *, skip_collectives: Collection[int] = ()) -> list[list[Array]]:
        """Return every rank's outputs from every rank's inputs (with weights, if they are inputs).

        In the collectives numbered ``skip_collectives`` every rank gets its own data, as if all others had sent the
        same. Controls, which must fail, use this.
        """
        known = [dict(feed) for feed in feeds]
        number = 0
        for stage in self._stages:
            for values in known:
                results = stage.session.run(list(stage.outputs), {name: values[name] for name in stage.inputs})
                values.update(zip(stage.outputs, results, strict=True))
            for collective, source, result in stage.exchanges:
                sent = [values[source] for values in known]
                received = _alone(collective, sent) if number in skip_collectives else collective.apply(sent)
                number += 1
                for values, value in zip(known, received, strict=True):
                    values[result] = value
        return [[values[name] for name in self._outputs] for values in known]


def _alone(collective: Collective, sent: list[Array]) -> list[Array]:
    return [collective.apply([own] * len(sent))[rank] for rank, own in enumerate(sent)]


def cut_at_collectives(model: onnx.ModelProto, num_threads: int) -> Iterable[Stage]:
    """Yield the stages. A node's stage is the number of collectives on the longest path to it."""
    register_schema()
    model = onnx.shape_inference.infer_shapes(model)  # a stage declares the types of its inputs
    graph = model.graph
    _write_masks_out(graph)
    made_at: dict[str, int] = defaultdict(int)
    nodes: dict[int, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        stage = max((made_at[name] for name in node.input if name), default=0)
        nodes[stage].append(node)
        for name in node.output:
            made_at[name] = stage + int(is_collective(node))
    wanted = _wanted(nodes, {output.name for output in graph.output})
    for stage in range(max(nodes) + 1):
        yield _stage(model, nodes[stage], wanted, num_threads)


def _write_masks_out(graph: onnx.GraphProto) -> None:
    """Expand a mask shared by all queries to a row for each: onnxruntime does not broadcast it, although ONNX does."""
    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input)}
    nodes = []
    for node in graph.node:
        if node.op_type == "Attention" and len(node.input) == MASK + 1:
            query, mask, rows, whole = node.input[0], node.input[MASK], f"{node.name}.rows", f"{node.name}.mask"
            shape = [types[query].shape.dim[2].dim_value, 1]
            graph.initializer.append(helper.make_tensor(rows, onnx.TensorProto.INT64, [2], shape))
            graph.value_info.append(helper.make_tensor_value_info(whole, types[mask].elem_type, [None] * 4))
            nodes.append(helper.make_node("Expand", [mask, rows], [whole]))
            node.input[MASK] = whole
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _wanted(nodes: Mapping[int, list[onnx.NodeProto]], outputs: set[str]) -> set[str]:
    """Return the values that another stage or exchange reads, and the graph's outputs."""
    wanted = set(outputs)
    for members in nodes.values():
        made = {name for node in members if not is_collective(node) for name in node.output}
        for node in members:
            wanted |= {name for name in node.input if is_collective(node) or name not in made}
    return wanted


def _stage(model: onnx.ModelProto, members: list[onnx.NodeProto], wanted: set[str], num_threads: int) -> Stage:
    compute = [_without_tensorrt_attributes(node) for node in members if not is_collective(node)]
    exchanges = [(read_collective(node), node.input[0], node.output[0]) for node in members if is_collective(node)]
    made = {name for node in compute for name in node.output}
    needed = dict.fromkeys(name for node in compute for name in node.input if name and name not in made)
    constants = {constant.name: constant for constant in model.graph.initializer}
    types = {value.name: value for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    inputs = tuple(name for name in needed if name not in constants)
    outputs = tuple(name for name in made if name in wanted)
    graph = helper.make_graph(
        compute,
        "stage",
        [types[name] for name in inputs],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [constants[name] for name in needed if name in constants],
    )
    session = _session(model, graph, num_threads) if compute else _Nothing()
    return Stage(session=session, inputs=inputs, outputs=outputs, exchanges=tuple(exchanges))


class _Nothing:
    def run(self, outputs: list[str], feeds: Values) -> list[Array]:
        return []


def _session(model: onnx.ModelProto, graph: onnx.GraphProto, num_threads: int) -> Any:
    opsets = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    stage = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(stage.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _without_tensorrt_attributes(node: onnx.NodeProto) -> onnx.NodeProto:
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    kept = [attribute for attribute in node.attribute if attribute.name != FUSED_ONLY]
    del plain.attribute[:]
    plain.attribute.extend(kept)
    return plain
