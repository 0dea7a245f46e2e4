"""ONNX graph of a traced forward's core, in the form that TensorRT supports."""

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
    """An ONNX graph and what its names stand for."""

    model: ir.Model
    """The graph."""
    inputs: tuple[str, ...]
    """Names of activations, in order."""
    weights: tuple[str, ...]
    """Weight inputs by ``state_dict`` key; empty if weights are constants of the graph."""
    outputs: tuple[str, ...]
    """Names of results, in order."""
    num_ranks: int
    """Ranks that its collectives span."""
    profiles: tuple[Profile, ...] = ()
    """Shapes that an engine covers, for a graph with dynamic dims."""

    def serialized(self) -> bytes:
        """Return the graph as bytes: at most 2 GiB, which a large model's constants exceed."""
        return bytes(ir.to_proto(self.model).SerializeToString())

    def takes(self, inputs: Mapping[str, Tensor]) -> bool:
        """Return whether an engine accepts inputs of these shapes: equal to static ones, and within one profile."""
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        declared = {str(value.name): value.shape for value in self.model.graph.inputs}
        fixed = {name: shape.numpy() for name in self.inputs if (shape := declared[name]) and shape.is_static()}
        if any(shapes[name] != tuple(shape) for name, shape in fixed.items()):
            return False
        return len(fixed) == len(self.inputs) or any(profile.covers(shapes) for profile in self.profiles)

    def collectives(self) -> dict[str, int]:
        """Return node counts by collective."""
        nodes = (node for node in self.model.graph if node.op_type == OP_TYPE)
        return dict(Counter(node.attributes["collective_operation"].as_string() for node in nodes))

    def dynamic_inputs(self) -> tuple[str, ...]:
        """Return the inputs with a dynamic dim."""
        shapes = {str(value.name): value.shape for value in self.model.graph.inputs}
        return tuple(name for name, shape in shapes.items() if shape is not None and not shape.is_static())

    def num_attentions(self) -> int:
        return sum(node.op_type == "Attention" for node in self.model.graph)


def export_core(parts: Parts, num_ranks: int, *, weights_as_inputs: bool = True) -> EngineGraph:
    """Translate ``parts.core``. ValueError for exchanges that TensorRT does not support (groups, unequal shares)."""
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
    """Translate a traced graph, with these names for its inputs and outputs."""
    arguments = example_inputs(core)
    with torch.no_grad(), _silence_exporter():
        program = torch.onnx.export(
            core,
            arguments,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=translation_table(num_ranks),
            dynamic_shapes=_dynamic_shapes(core),
            optimize=False,  # done below: here it would fold weights, which are to become inputs
            verbose=False,
        )
    assert program is not None
    model = program.model
    _rename(model.graph.inputs, inputs)
    _separate_outputs(model.graph)
    _rename(model.graph.outputs, outputs)
    weights = _name_weights(model.graph, _parameters(core), as_inputs=weights_as_inputs)
    input_names = [(value, value.name) for value in model.graph.inputs]
    _simplify(model)
    for value, name in input_names:
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
    """Run onnxscript's optimizer without its rewrite rules.

    TensorRT has its own; these take minutes on a large model, quadratic in its layers.
    """
    passes.InlinePass()(model)
    optimizer.fold_constants(model)
    cleanup_passes: tuple[Any, ...] = (
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )
    for cleanup in cleanup_passes:
        cleanup(model)


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Silence the exporter's warning about missing torchvision, which is unused here."""
    with log_level(logging.ERROR, ONNX_REGISTRATION_LOGGER), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def example_inputs(core: fx.GraphModule) -> tuple[Tensor, ...]:
    """Return inputs of the traced shapes, fake if the weights are."""
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
    """Copy outputs that are also inputs or other outputs, so that each value has one name."""
    seen = set(graph.inputs)
    for index, value in enumerate(graph.outputs):
        if value in seen:
            copied = ir.node("Identity", [value])
            graph.append(copied)
            copied.outputs[0].shape, copied.outputs[0].type = value.shape, value.type
            graph.outputs[index] = copied.outputs[0]
        seen.add(graph.outputs[index])


def _rename(values: Any, names: tuple[str, ...]) -> None:
    for value, name in zip(values, names, strict=True):
        value.name = name


def _parameters(core: fx.GraphModule) -> set[str]:
    return {name for name, _ in core.named_parameters()}


def _name_weights(graph: ir.Graph, parameters: set[str], *, as_inputs: bool) -> tuple[str, ...]:
    """Name parameters by ``state_dict`` key and, if ``as_inputs``, make them inputs. Buffers stay constants."""
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
    """Return the names of the remaining inputs. A value of which only the shape was used is no input of the engine."""
    used = [value for value in graph.inputs if value.uses() or value in graph.outputs]
    graph.inputs.clear()
    graph.inputs.extend(used)
    return {str(value.name) for value in used}


def _mark_attention(graph: ir.Graph) -> None:
    """Mark half-precision attention as fused-only, float32 as decomposable, since it has no fused kernel."""
    for node in graph:
        if node.op_type == "Attention":
            node.domain = ""
            is_float32 = node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT
            node.attributes[FUSED_ONLY] = ir.AttrInt64(FUSED_ONLY, int(is_float32))


def _drop_metadata(model: ir.Model) -> None:
    """Remove stack traces and paths, so that a model gives the same bytes on every machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
