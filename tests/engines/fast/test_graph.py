"""A replay reads its inputs, with fakes for CUDA's streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from engines.fast import graph
from engines.fast.graph import CapturedStep, GraphPool


@pytest.fixture
def pool() -> Iterator[GraphPool]:
    cuda = dict.fromkeys(("CUDAGraph", "current_stream", "graph_pool_handle"), Mock())
    contexts = dict.fromkeys(("graph", "stream"), Mock(side_effect=lambda *_, **__: nullcontext()))
    with patch.object(graph, "named_stream"), patch.multiple(torch.cuda, **cuda, **contexts):
        yield GraphPool(torch.device("cpu"))


def test_a_replay_reads_what_it_is_given(pool: GraphPool) -> None:
    step = CapturedStep(lambda tensors: tensors["x"] + tensors["y"], numbers(1.0, 2.0), pool)
    seen: list[tuple[float, float]] = []
    step._graph.replay.side_effect = lambda: seen.append((step.inputs["x"].item(), step.inputs["y"].item()))  # type: ignore[attr-defined]
    step(numbers(3.0, 4.0))
    step({"x": step.inputs["x"], "y": torch.tensor(5.0)})
    assert seen == [(3.0, 4.0), (3.0, 5.0)]


def test_graphs_of_a_pool_read_inputs_of_one_shape_from_one_buffer(pool: GraphPool) -> None:
    one, other = (CapturedStep(lambda tensors: tensors["x"], numbers(value, value), pool) for value in (1.0, 2.0))
    assert one.inputs["x"] is other.inputs["x"]
    assert one.inputs["x"] is not one.inputs["y"]


def numbers(x: float, y: float) -> dict[str, Tensor]:
    return {"x": torch.tensor(x), "y": torch.tensor(y)}
