"""ONNX's side of the collectives: the operator schema, and writing ``DistCollective`` nodes."""

from __future__ import annotations

import functools
from typing import Any

import onnx
from onnx import helper

from engines.tensorrt_engine.export.onnx.collectives import DOMAIN, GROWING, OP_TYPE, SHRINKING, Collective

OPSET = 23
"""The first with ``Attention``, which TensorRT runs as one fused kernel."""

FUSED_ONLY = "TRT_decomposable"
"""Attribute on ``Attention``: 0 makes TensorRT fuse it or (fp16) fail, never decompose it into matrix products."""

_INTEGERS = ("root", "nb_rank", "group_size")
_STRINGS = ("collective_operation", "reduce_op")
_TYPES = ("float", "float16", "bfloat16", "int8", "int32", "int64")


def _infer(context: Any) -> None:
    attributes = {name: context.get_attribute(name) for name in _STRINGS[:1] + _INTEGERS[1:2]}
    operation, num_ranks = attributes["collective_operation"].s.decode(), attributes["nb_rank"].i
    output = onnx.TypeProto()
    output.CopyFrom(context.get_input_type(0))
    rows = output.tensor_type.shape.dim[0]
    if operation in GROWING + SHRINKING:
        if rows.HasField("dim_value"):
            rows.dim_value = rows.dim_value * num_ranks if operation in GROWING else rows.dim_value // num_ranks
        else:
            rows.Clear()
    context.set_output_type(0, output)


@functools.cache
def register_schema() -> None:
    """Makes ONNX's checker and shape inference know the node (once per process)."""
    schema = onnx.defs.OpSchema
    kinds = dict.fromkeys(_INTEGERS, schema.AttrType.INT) | dict.fromkeys(_STRINGS, schema.AttrType.STRING)
    collective = schema(
        OP_TYPE,
        DOMAIN,
        1,
        inputs=[schema.FormalParameter("x", "T")],
        outputs=[schema.FormalParameter("y", "T")],
        type_constraints=[("T", [f"tensor({name})" for name in _TYPES], "")],
        attributes=[schema.Attribute(name, kind, "", required=True) for name, kind in kinds.items()],
    )
    collective.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(collective)
    onnx.defs.register_schema(_ring_attention_schema())


def _ring_attention_schema() -> Any:
    """Returns ``Attention`` with TensorRT's extra attribute; it goes to ONNX's own domain after the export."""
    schema = onnx.defs.OpSchema
    return schema(
        "Attention",
        DOMAIN,
        1,
        inputs=[schema.FormalParameter(name, "T") for name in ("q", "k", "v")],
        outputs=[schema.FormalParameter("y", "T")],
        type_constraints=[("T", [f"tensor({name})" for name in _TYPES[:3]], "")],
        attributes=[schema.Attribute("nb_rank", schema.AttrType.INT, "", required=True)],
    )


def collective_node(collective: Collective, source: str, result: str) -> onnx.NodeProto:
    """Returns a node that TensorRT's parser turns into an ``IDistCollectiveLayer``."""
    attributes: dict[str, Any] = {**collective.attributes()}
    return helper.make_node(OP_TYPE, [source], [result], domain=DOMAIN, **attributes)
