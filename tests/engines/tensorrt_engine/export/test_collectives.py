"""A ``DistCollective`` node means the same as torch.distributed, run here with Gloo on four ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.distributed as dist
from onnx import helper

from engines.tensorrt_engine.export.collectives import Collective, collective_node, register_schema
from tests.engines.tensorrt_engine.support.collective_nodes import node_with_groups, read_collective
from tests.engines.tensorrt_engine.support.one_layer import OPSETS

NUM_RANKS = 4
ROOT = 2
REDUCE_OPS = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN", "avg": "AVG"}


def options(made: Any, what: Collective) -> Any:
    if what.reduction != "none":
        made.reduceOp = getattr(dist.ReduceOp, REDUCE_OPS[what.reduction])
    if what.root >= 0:
        made.rootRank = what.root
    return made


def with_gloo(group: Any, what: Collective, x: torch.Tensor, rank: int) -> torch.Tensor:
    n, is_root, rows = what.num_ranks, rank == what.root, x.shape[0]
    y = x.clone()
    match what.operation:
        case "all_reduce":
            group.allreduce([y], options(dist.AllreduceOptions(), what)).wait()
        case "all_gather":
            y = x.new_empty(n * rows, *x.shape[1:])
            group._allgather_base(y, x).wait()
        case "broadcast":
            group.broadcast([y], options(dist.BroadcastOptions(), what)).wait()
        case "reduce":
            group.reduce([y], options(dist.ReduceOptions(), what)).wait()
        case "reduce_scatter":
            y = x.new_empty(rows // n, *x.shape[1:])
            group._reduce_scatter_base(y, x, options(dist.ReduceScatterOptions(), what)).wait()
        case "all_to_all":
            group.alltoall_base(y, x, [], []).wait()
        case "gather":
            got = [torch.empty_like(x) for _ in range(n)]
            group.gather([got] if is_root else [], [x], options(dist.GatherOptions(), what)).wait()
            y = torch.cat(got)
        case "scatter":
            y = x.new_empty(rows // n, *x.shape[1:])
            group.scatter([y], [list(x.chunk(n))] if is_root else [], options(dist.ScatterOptions(), what)).wait()
    return y


def on_ranks(body: Callable[[Any, int], torch.Tensor]) -> list[torch.Tensor]:
    """Run ranks as threads, each with a Gloo group of its own over one store. Return their results."""
    store, results = dist.HashStore(), [torch.empty(0)] * NUM_RANKS  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        results[rank] = body(dist.ProcessGroupGloo(store, rank, NUM_RANKS), rank)  # type: ignore[call-arg]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


REDUCED = [(op, reduction, ROOT if op == "reduce" else -1)
           for op in ("all_reduce", "reduce", "reduce_scatter") for reduction in REDUCE_OPS]  # fmt: skip
MOVED = [("all_gather", "none", -1), ("all_to_all", "none", -1)] + [
    (op, "none", ROOT) for op in ("broadcast", "gather", "scatter")
]


@pytest.mark.parametrize(("operation", "reduction", "root"), REDUCED + MOVED)
def test_means_what_torch_distributed_does(operation: Any, reduction: Any, root: int) -> None:
    what = Collective(operation=operation, num_ranks=NUM_RANKS, reduction=reduction, root=root)
    inputs = [torch.randn(8, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(NUM_RANKS)]
    expected = on_ranks(lambda group, rank: with_gloo(group, what, inputs[rank], rank))
    actual = what.apply([x.numpy() for x in inputs])
    for rank in range(NUM_RANKS) if operation not in ("reduce", "gather") else (ROOT,):
        np.testing.assert_allclose(actual[rank], expected[rank].numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", ["reduce", "gather"])
def test_what_nccl_leaves_unspecified_is_nan(operation: Any) -> None:
    what = Collective(operation=operation, num_ranks=2, reduction="sum" if operation == "reduce" else "none", root=1)
    outputs = what.apply([np.ones((2, 2), np.float32)] * 2)
    assert np.isnan(outputs[0]).all()
    assert not np.isnan(outputs[1]).any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operation": "all_reduce"}, "reduction"),
        ({"operation": "all_to_all", "reduction": "sum"}, "reduction"),
        ({"operation": "broadcast"}, "root"),
        ({"operation": "all_gather", "root": 0}, "root"),
        ({"operation": "broadcast", "root": 2}, "root"),
        ({"operation": "all_shuffle"}, "none of"),
    ],
)
def test_nonsense_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collective(**({"num_ranks": 2} | wrong))


@pytest.mark.parametrize(("operation", "reduction", "root"), REDUCED + MOVED)
def test_node_round_trip_and_inferred_shape(operation: Any, reduction: Any, root: int) -> None:
    register_schema()
    what = Collective(operation=operation, num_ranks=NUM_RANKS, reduction=reduction, root=root)
    node = collective_node(what, "x", "y")
    assert read_collective(node) == what
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", 1, (8, 3))], [value("y", 1, None)])
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=OPSETS), strict_mode=True)
    rows = model.graph.output[0].type.tensor_type.shape.dim[0].dim_value
    assert rows == what.apply([np.zeros((8, 3), np.float32)] * NUM_RANKS)[0].shape[0]


def test_groups_are_refused_when_read() -> None:
    what = Collective(operation="all_gather", num_ranks=2)
    with pytest.raises(ValueError, match="ignored by TensorRT"):
        read_collective(node_with_groups(what, [0, 1]))
