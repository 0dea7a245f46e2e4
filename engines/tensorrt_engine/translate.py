"""torch's functional collectives as ``DistCollective`` nodes, for ``torch.onnx.export``'s translation table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnxscript.values import Opset
from torch.distributed import distributed_c10d

from engines.tensorrt_engine.collectives import DOMAIN, Collective, Operation, Reduction
from engines.tensorrt_engine.native_ring import RING_ATTENTION
from engines.tensorrt_engine.onnx_nodes import OPSET, register_schema
from engines.tensorrt_engine.quantize import QUANTIZE_DEQUANTIZE

_REDUCTIONS: dict[str, Reduction] = {
    "sum": "sum", "avg": "avg", "product": "prod", "max": "max", "min": "min",
}  # fmt: skip


def translation_table(num_ranks: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations for a plan of ``num_ranks``. A collective over fewer ranks is an error: it would need ``groups``."""
    register_schema()
    opset = Opset(DOMAIN, 1)

    def node(x: Any, operation: Operation, group: str, reduction: Reduction = "none", root: int = -1) -> Any:
        _require_whole_team(group, num_ranks, operation)
        what = Collective(operation=operation, num_ranks=num_ranks, reduction=reduction, root=root)
        return opset.DistCollective(x, **what.attributes())

    def all_to_all(x: Any, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> Any:
        if len({*output_splits, *input_splits}) > 1:
            raise ValueError(f"TensorRT's all-to-all sends equal shares, not {list(input_splits)} (ring exchange?)")
        return node(x, "all_to_all", group)

    def all_gather(x: Any, group_size: int, group: str) -> Any:
        return node(x, "all_gather", group)

    def all_reduce(x: Any, reduce_op: str, group: str) -> Any:
        return node(x, "all_reduce", group, _REDUCTIONS[reduce_op.lower()])

    def reduce_scatter(x: Any, reduce_op: str, group_size: int, group: str) -> Any:
        return node(x, "reduce_scatter", group, _REDUCTIONS[reduce_op.lower()])

    def broadcast(x: Any, source: int, group: str) -> Any:
        return node(x, "broadcast", group, root=source)

    def wait(x: Any) -> Any:
        return x

    standard = Opset("", OPSET)

    def quantize_dequantize(x: Any, scale: Any, axis: int, kind: str) -> Any:
        where = {} if axis < 0 else {"axis": axis}
        stored = onnx.TensorProto.INT8 if kind == "int8" else onnx.TensorProto.FLOAT8E4M3FN
        quantized = standard.QuantizeLinear(x, scale, output_dtype=stored, **where)
        return standard.DequantizeLinear(quantized, scale, **where)

    def ring_attention(q: Any, k: Any, v: Any, num_ranks: int) -> Any:
        return opset.Attention(q, k, v, nb_rank=num_ranks)  # to the standard domain after the export

    ops = torch.ops._c10d_functional
    return {
        RING_ATTENTION: ring_attention,
        QUANTIZE_DEQUANTIZE: quantize_dequantize,
        ops.all_to_all_single.default: all_to_all,
        ops.all_gather_into_tensor.default: all_gather,
        ops.all_reduce.default: all_reduce,
        ops.reduce_scatter_tensor.default: reduce_scatter,
        ops.broadcast.default: broadcast,
        ops.wait_tensor.default: wait,
    }


def _require_whole_team(group: str, num_ranks: int, operation: str) -> None:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    size = resolve(group).size()
    if size != num_ranks:
        raise ValueError(
            f"{operation} over {size} of {num_ranks} ranks: TensorRT ignores groups, so it cannot be exported"
        )
