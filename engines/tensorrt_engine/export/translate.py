"""Translation table for ``torch.onnx.export``: functional collectives of torch as ``DistCollective`` nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnxscript.values import Opset

from engines.core.torch_private import collective_ops, process_group
from engines.quantization.onnx import QUANTIZE_DEQUANTIZE
from engines.tensorrt_engine.export.attention import RING_ATTENTION
from engines.tensorrt_engine.export.collectives import DOMAIN, OPSET, Collective, Reduction, register_schema

_OWN, _STANDARD = Opset(DOMAIN, 1), Opset("", OPSET)
_REDUCTIONS: dict[str, Reduction] = {
    "sum": "sum", "avg": "avg", "product": "prod", "max": "max", "min": "min",
}  # fmt: skip


Translation = Callable[..., Any]


def translation_table(num_ranks: int) -> dict[Callable[..., Any], Translation]:
    """Return the table for an engine of ``num_ranks``.

    Translations raise ValueError for a collective over fewer ranks, which would need ``groups``.
    """
    register_schema()
    ops = collective_ops
    return {
        ops.all_to_all_single.default: _all_to_all(num_ranks),
        ops.all_gather_into_tensor.default: _all_gather(num_ranks),
        ops.all_reduce.default: _all_reduce(num_ranks),
        ops.reduce_scatter_tensor.default: _reduce_scatter(num_ranks),
        ops.broadcast.default: _broadcast(num_ranks),
        ops.wait_tensor.default: _wait,
        QUANTIZE_DEQUANTIZE: _quantize_dequantize,
        RING_ATTENTION: _ring_attention,
    }


def _node(x: Any, what: Collective, group: str) -> Any:
    _check_whole_team(group, what.num_ranks, what.operation)
    return _OWN.DistCollective(x, **what.attributes())


def _all_to_all(num_ranks: int) -> Translation:
    def all_to_all(x: Any, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> Any:
        if len({*output_splits, *input_splits}) > 1:
            raise ValueError(f"TensorRT's all-to-all sends equal shares, not {list(input_splits)} (ring exchange?)")
        return _node(x, Collective(operation="all_to_all", num_ranks=num_ranks), group)

    return all_to_all


def _all_gather(num_ranks: int) -> Translation:
    def all_gather(x: Any, group_size: int, group: str) -> Any:
        return _node(x, Collective(operation="all_gather", num_ranks=num_ranks), group)

    return all_gather


def _all_reduce(num_ranks: int) -> Translation:
    def all_reduce(x: Any, reduce_op: str, group: str) -> Any:
        reduction = _REDUCTIONS[reduce_op.lower()]
        return _node(x, Collective(operation="all_reduce", num_ranks=num_ranks, reduction=reduction), group)

    return all_reduce


def _reduce_scatter(num_ranks: int) -> Translation:
    def reduce_scatter(x: Any, reduce_op: str, group_size: int, group: str) -> Any:
        reduction = _REDUCTIONS[reduce_op.lower()]
        return _node(x, Collective(operation="reduce_scatter", num_ranks=num_ranks, reduction=reduction), group)

    return reduce_scatter


def _broadcast(num_ranks: int) -> Translation:
    def broadcast(x: Any, source: int, group: str) -> Any:
        return _node(x, Collective(operation="broadcast", num_ranks=num_ranks, root=source), group)

    return broadcast


def _wait(x: Any) -> Any:
    return x


def _quantize_dequantize(x: Any, scale: Any, axis: int, kind: str) -> Any:
    where = {} if axis < 0 else {"axis": axis}
    stored = onnx.TensorProto.INT8 if kind == "int8" else onnx.TensorProto.FLOAT8E4M3FN
    quantized = _STANDARD.QuantizeLinear(x, scale, output_dtype=stored, **where)
    return _STANDARD.DequantizeLinear(quantized, scale, **where)


def _ring_attention(q: Any, k: Any, v: Any, num_ranks: int) -> Any:
    return _OWN.Attention(q, k, v, nb_rank=num_ranks)  # goes to the standard domain after the export


def _check_whole_team(group: str, num_ranks: int, operation: str) -> None:
    size = process_group(group).size()
    if size != num_ranks:
        raise ValueError(
            f"{operation} over {size} of {num_ranks} ranks: TensorRT ignores groups, so it cannot be exported"
        )
