"""Read ``DistCollective`` nodes, and make some with attributes that the product never writes."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from engines.tensorrt_engine.export.collectives import DOMAIN, OP_TYPE, Collective


def is_collective(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == OP_TYPE)


def read_collective(node: onnx.NodeProto) -> Collective:
    """Return the meaning of a node. Raise ValueError if it names ``groups``, which TensorRT ignores."""
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if values.get("groups"):
        raise ValueError(f"{node.name or OP_TYPE}: groups {list(values['groups'])} would be ignored by TensorRT")
    return Collective(
        operation=values["collective_operation"].decode(),
        num_ranks=values["nb_rank"],
        reduction=values["reduce_op"].decode(),
        root=values["root"],
    )


def node_with_groups(collective: Collective, groups: list[int]) -> onnx.NodeProto:
    """Return a node over some of the ranks only."""
    attributes: Any = collective.attributes() | {"groups": groups, "group_size": len(groups)}
    return helper.make_node(OP_TYPE, ["x"], ["y"], domain=DOMAIN, **attributes)
