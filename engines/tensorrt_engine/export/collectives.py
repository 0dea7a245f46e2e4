"""The eight collectives of TensorRT's ``DistCollective`` node: attributes, semantics, and its ONNX schema.

A collective works on dim 0. ``groups`` is deliberately absent: TensorRT silently ignores it for the symmetric
operations (pytorch/TensorRT #4380, and RTX 1.7.1 in our tests). Every collective here spans all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Operation = Literal[
    "all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "all_to_all", "gather", "scatter"
]
Reduction = Literal["none", "sum", "prod", "max", "min", "avg"]
Array = npt.NDArray[Any]

OP_TYPE = "DistCollective"
DOMAIN = "troupe"
ROOTED: tuple[Operation, ...] = ("broadcast", "reduce", "gather", "scatter")
REDUCING: tuple[Operation, ...] = ("all_reduce", "reduce", "reduce_scatter")
GROWING: tuple[Operation, ...] = ("all_gather", "gather")
SHRINKING: tuple[Operation, ...] = ("reduce_scatter", "scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective, as attributes of its ONNX node."""

    operation: Operation
    """TensorRT's name of it."""
    num_ranks: int
    """All ranks of the communicator take part."""
    reduction: Reduction = "none"
    """Operation that combines values; "none" if they are only moved."""
    root: int = -1
    """Rank that sends or receives all; -1 for the symmetric operations."""

    def __post_init__(self) -> None:
        if self.operation not in get_args(Operation):
            raise ValueError(f"collective {self.operation!r} is none of {', '.join(get_args(Operation))}")
        if (self.reduction != "none") != (self.operation in REDUCING):
            raise ValueError(f"{self.operation} with reduction {self.reduction!r}: {', '.join(REDUCING)} need one")
        if (self.root >= 0) != (self.operation in ROOTED) or self.root >= self.num_ranks:
            raise ValueError(f"{self.operation} with root {self.root} on {self.num_ranks} ranks")

    def attributes(self) -> dict[str, str | int]:
        """Return all attributes of the node: TensorRT's parser has no defaults for symmetric operations."""
        return {
            "collective_operation": self.operation,
            "reduce_op": self.reduction,
            "root": self.root,
            "nb_rank": self.num_ranks,
            "group_size": 0,
        }

    def apply(self, inputs: Sequence[Array]) -> list[Array]:
        """Return all ranks' outputs from all ranks' inputs. Outputs that NCCL leaves undefined are NaN (or 0)."""
        if len(inputs) != self.num_ranks:
            raise ValueError(f"{self.operation} over {self.num_ranks} ranks got {len(inputs)} inputs")
        return [np.ascontiguousarray(out) for out in _SEMANTICS[self.operation](self, list(inputs))]


def _undefined_like(like: Array) -> Array:
    return np.full_like(like, np.nan if np.issubdtype(like.dtype, np.floating) else 0)


def _on_root(collective: Collective, out: Array) -> list[Array]:
    return [out if rank == collective.root else _undefined_like(out) for rank in range(collective.num_ranks)]


def _reduce(collective: Collective, inputs: list[Array]) -> Array:
    stacked = np.stack(inputs)
    reduce: Any = {
        "sum": np.sum, "avg": np.mean, "prod": np.prod, "max": np.max, "min": np.min,
    }[collective.reduction]  # fmt: skip
    reduced: Array = reduce(stacked, axis=0).astype(stacked.dtype)
    return reduced


def _all_to_all(collective: Collective, inputs: list[Array]) -> list[Array]:
    chunks = [np.split(x, collective.num_ranks) for x in inputs]
    return [np.concatenate([sent[rank] for sent in chunks]) for rank in range(collective.num_ranks)]


_SEMANTICS: dict[Operation, Callable[[Collective, list[Array]], list[Array]]] = {
    "all_reduce": lambda c, xs: [_reduce(c, xs)] * c.num_ranks,
    "all_gather": lambda c, xs: [np.concatenate(xs)] * c.num_ranks,
    "broadcast": lambda c, xs: [xs[c.root]] * c.num_ranks,
    "reduce": lambda c, xs: _on_root(c, _reduce(c, xs)),
    "reduce_scatter": lambda c, xs: np.split(_reduce(c, xs), c.num_ranks),
    "all_to_all": _all_to_all,
    "gather": lambda c, xs: _on_root(c, np.concatenate(xs)),
    "scatter": lambda c, xs: np.split(xs[c.root], c.num_ranks),
}


OPSET = 23
"""The first opset with ``Attention``, which TensorRT runs as one fused kernel."""

FUSED_ONLY = "TRT_decomposable"
"""Attribute of ``Attention``: with 0, TensorRT fuses it or (fp16) fails; it never decomposes it into GEMMs."""

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
    """Register the node with ONNX's checker and shape inference, once per process."""
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
    """Return the schema of ``Attention`` with TensorRT's extra attribute, for use until the export is complete."""
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
    """Return a node that TensorRT parses into an ``IDistCollectiveLayer``."""
    attributes: dict[str, Any] = {**collective.attributes()}
    return helper.make_node(OP_TYPE, [source], [result], domain=DOMAIN, **attributes)
