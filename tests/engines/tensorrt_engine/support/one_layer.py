"""ONNX networks of a single node."""

from __future__ import annotations

from typing import Any

from onnx import NodeProto, TensorProto, helper

from engines.tensorrt_engine.export.collectives import DOMAIN, Collective, collective_node
from tests.engines.tensorrt_engine.support.collective_nodes import node_with_groups

OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def collective(operation: str, num_ranks: int = 2, reduction: str = "sum") -> Collective:
    reduces = operation in ("all_reduce", "reduce", "reduce_scatter")
    return Collective(
        operation=operation,  # type: ignore[arg-type]
        num_ranks=num_ranks,
        reduction=reduction if reduces else "none",  # type: ignore[arg-type]
        root=0 if operation in ROOTED else -1,
    )


def network(node: NodeProto, shapes: dict[str, tuple[int, ...]], dtype: str) -> bytes:
    kind = getattr(TensorProto, dtype)
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "one_layer", inputs, [helper.make_tensor_value_info("y", kind, None)])
    return bytes(helper.make_model(graph, opset_imports=OPSETS).SerializeToString())


def collective_network(what: Collective, dtype: str, groups: list[int] | None = None) -> bytes:
    node = node_with_groups(what, groups) if groups else collective_node(what, "x", "y")
    return network(node, {"x": (8, 16)}, dtype)


def attention_network(dtype: str, *, num_heads: int = 4, head_dim: int = 64, **attributes: Any) -> bytes:
    shape = (1, num_heads, 256, head_dim)
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], **attributes)
    return network(node, {"q": shape, "k": shape, "v": shape}, dtype)
