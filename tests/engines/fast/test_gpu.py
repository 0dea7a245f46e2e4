"""A step runs in a CUDA graph. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from engines.core.model import StepTensors
from engines.fast.graph import CapturedStep, GraphPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_captured_step_reads_new_inputs_and_graphs_share_a_pool() -> None:
    weight = torch.randn(8, 8, device="cuda")
    pool = GraphPool(torch.device("cuda"))

    def step(inputs: StepTensors) -> torch.Tensor:
        return inputs["x"] @ weight + 1

    captured = {rows: CapturedStep(step, {"x": torch.zeros(rows, 8, device="cuda")}, pool) for rows in (4, 6)}
    given = [torch.randn(rows, 8, device="cuda") for rows in (4, 6, 4, 6)]
    answers = [captured[len(x)]({"x": x}).clone() for x in given]
    for x, answer in zip(given, answers, strict=True):
        torch.testing.assert_close(answer, step({"x": x}))
    for one in captured.values():
        one.close()
