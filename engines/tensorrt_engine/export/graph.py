"""The core of a traced forward as an ONNX graph that TensorRT takes."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from torch import Tensor, fx
from torch.export import Dim

from engines.core.logs import log_level
from engines.core.torch_private import ONNX_REGISTRATION_LOGGER, fake_mode_of
from engines.tensorrt_engine.build.builder import Profile
from engines.tensorrt_engine.export.collectives import FUSED_ONLY, OP_TYPE, OPSET
from engines.tensorrt_engine.export.partition import Parts
from engines.tensorrt_engine.export.translate import translation_table

WEIGHT_PREFIX = "module."


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGraph:
    """An ONNX graph and what it is fed. ``weights`` are ``state_dict`` keys; empty when they are constants inside.

    ``profiles`` are the shapes that an engine of a graph with dynamic dims is to take; a static graph has none.
    """

    model: ir.Model
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    num_ranks: int
    profiles: tuple[Profile, ...] = ()

    def serialized(self) -> bytes:
        """Returns the graph as bytes (below 2 GiB: so with weights outside, or a small model)."""
        return bytes(ir.to_proto(self.model).SerializeToString())

    def takes(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether an engine of this graph takes inputs of these shapes: the fixed ones, or all within one profile."""
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        declared = {str(value.name): value.shape for value in self.model.graph.inputs}
        fixed = {name: shape.numpy() for name in self.inputs if (shape := declared[name]) and shape.is_static()}
        if any(shapes[name] != tuple(shape) for name, shape in fixed.items()):
            return False
        return len(fixed) == len(self.inputs) or any(profile.covers(shapes) for profile in self.profiles)

    def collectives(self) -> dict[str, int]:
        """Returns the number of nodes of each collective."""
        nodes = (node for node in self.model.graph if node.op_type == OP_TYPE)
        return dict(Counter(node.attributes["collective_operation"].as_string() for node in nodes))

    def dynamic_inputs(self) -> tuple[str, ...]:
        """Returns the inputs of which some dim is not fixed."""
        shapes = {str(value.name): value.shape for value in self.model.graph.inputs}
        return tuple(name for name, shape in shapes.items() if shape is not None and not shape.is_static())

    def num_attentions(self) -> int:
        return sum(node.op_type == "Attention" for node in self.model.graph)


def export_core(parts: Parts, num_ranks: int, *, weights_as_inputs: bool = True) -> EngineGraph:
    """Translates ``parts.core``. Raises ValueError for exchanges that TensorRT cannot do (groups, unequal shares)."""
    inputs, outputs = parts.core_inputs, parts.core_outputs
    return export_graph(parts.core, inputs, outputs, num_ranks, weights_as_inputs=weights_as_inputs)


def export_graph(
    core: fx.GraphModule,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    num_ranks: int,
    *,
    weights_as_inputs: bool = True,
) -> EngineGraph:
    """Translates any traced graph; its inputs and outputs get these names."""
    arguments = example_inputs(core)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            core,
            arguments,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=translation_table(num_ranks),
            dynamic_shapes=_dynamic_shapes(core),
            optimize=False,  # done below: it would fold weights before they can become inputs
            verbose=False,
        )
    assert program is not None
    model = program.model
    _rename(model.graph.inputs, inputs)
    _separate_outputs(model.graph)
    _rename(model.graph.outputs, outputs)
    weights = _name_weights(model.graph, _parameters(core), as_inputs=weights_as_inputs)
    named = [(value, value.name) for value in model.graph.inputs]
    _simplify(model)
    for value, name in named:
        value.name = name  # an input that is also an output was renamed
    _mark_attention(model.graph)
    _drop_metadata(model)
    used = _drop_unused_inputs(model.graph)
    return EngineGraph(
        model=model,
        inputs=tuple(name for name in inputs if name in used),
        weights=tuple(name for name in weights if name in used),
        outputs=outputs,
        num_ranks=num_ranks,
    )


def _simplify(model: ir.Model) -> None:
    """Runs onnxscript's optimizer without its rewrite rules: TensorRT has its own, and these take minutes on a large
    model, in time that grows with the square of its layers.
    """
    passes.InlinePass()(model)
    optimizer.fold_constants(model)
    tidying: tuple[Any, ...] = (
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )
    for tidy in tidying:
        tidy(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warning that torchvision is missing; nothing here uses it."""
    with log_level(logging.ERROR, ONNX_REGISTRATION_LOGGER), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def example_inputs(core: fx.GraphModule) -> tuple[Tensor, ...]:
    """Returns inputs of the traced shapes, fake where the weights are."""
    weight = next(iter(core.parameters()), None)
    with nullcontext() if weight is None else fake_mode_of(weight):
        values = [node.meta["val"] for node in core.graph.nodes if node.op == "placeholder"]
        return tuple(torch.zeros(_hint(value), dtype=value.dtype, device=value.device) for value in values)


def _hint(value: Tensor) -> tuple[int, ...]:
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape)


def _dynamic_shapes(core: fx.GraphModule) -> tuple[dict[int, Any], ...] | None:
    values = [node.meta["val"] for node in core.graph.nodes if node.op == "placeholder"]
    dims = tuple({d: Dim.AUTO for d, size in enumerate(v.shape) if isinstance(size, torch.SymInt)} for v in values)
    return dims if any(dims) else None


def _separate_outputs(graph: ir.Graph) -> None:
    """Makes an output that is an input too, or another output, a value of its own: each has one name."""
    taken = set(graph.inputs)
    for index, value in enumerate(graph.outputs):
        if value in taken:
            copied = ir.node("Identity", [value])
            graph.append(copied)
            copied.outputs[0].shape, copied.outputs[0].type = value.shape, value.type
            graph.outputs[index] = copied.outputs[0]
        taken.add(graph.outputs[index])


def _rename(values: Any, names: tuple[str, ...]) -> None:
    for value, name in zip(values, names, strict=True):
        value.name = name


def _parameters(core: fx.GraphModule) -> set[str]:
    return {name for name, _ in core.named_parameters()}


def _name_weights(graph: ir.Graph, parameters: set[str], *, as_inputs: bool) -> tuple[str, ...]:
    """Names parameters by their ``state_dict`` keys and, ``as_inputs``, makes them inputs. Buffers stay constants."""
    weights = [value for name, value in graph.initializers.items() if name in parameters]
    for value in weights:
        del graph.initializers[str(value.name)]
        value.name = str(value.name).removeprefix(WEIGHT_PREFIX)
        if as_inputs:
            value.const_value = None
            graph.inputs.append(value)
        else:
            graph.initializers[value.name] = value
    return tuple(str(value.name) for value in weights) if as_inputs else ()


def _drop_unused_inputs(graph: ir.Graph) -> set[str]:
    """Returns the names of the inputs that are left. A value whose shape alone mattered is no input of the engine."""
    used = [value for value in graph.inputs if value.uses() or value in graph.outputs]
    graph.inputs.clear()
    graph.inputs.extend(used)
    return {str(value.name) for value in used}


def _mark_attention(graph: ir.Graph) -> None:
    """Marks half precision as fused only (or the build fails); float32 has no fused kernel and must be decomposable."""
    for node in graph:
        if node.op_type == "Attention":
            node.domain = ""
            wide = node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT
            node.attributes[FUSED_ONLY] = ir.AttrInt64(FUSED_ONLY, int(wide))


def _drop_metadata(model: ir.Model) -> None:
    """Takes stack traces and paths out: the same model gives the same bytes wherever it is exported."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
