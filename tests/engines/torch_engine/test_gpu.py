"""On a GPU: Triton's kernels as compiled, capture and replay, and half-precision accuracy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from engines.core.model import Branch, DenoiserModel
from engines.core.tensors import relative_difference
from engines.torch_engine import steps
from engines.torch_engine.compiler import with_rewrites
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(dtype: torch.dtype) -> tuple[DenoiserModel, Branch]:
    from tests.support.flux_denoiser import as_denoiser

    (branch,) = models.branches("flux", "uneven")
    floats = ("img_ids", "txt_ids")
    inputs = {name: x.to("cuda", None if name in floats else dtype) for name, x in branch.inputs.items()}
    return as_denoiser(models.transformer("flux").to("cuda", dtype)), replace(branch, inputs=inputs)


def predict(dtype: torch.dtype, fast: bool, *, times: int = 1) -> list[Tensor]:
    model, branch = on_gpu(dtype)
    engine = TorchEngine(model, fast=fast, compiled=False)
    answers = [engine.predict((branch,), (0,))[0] for _ in range(times)]
    assert engine.was_warm == (times > 1)
    engine.close()
    return answers


def test_triton_kernels_equal_the_plain_ones() -> None:
    from tests.engines.fast.support import triton_check, weight_sums_check

    triton_check.main("cuda")
    weight_sums_check.main("cuda")


@pytest.mark.parametrize("fast", [True, False])
def test_replays_equal_the_first_run(fast: bool) -> None:
    first, *others = predict(torch.float32, fast, times=4)
    assert all(relative_difference(other, first) < 1e-5 for other in others)


def test_replays_read_new_inputs() -> None:
    model, branch = on_gpu(torch.float32)
    engine = TorchEngine(model, fast=True)
    for scale in (1.0, 2.0, 0.5, 1.0):
        inputs = {**branch.inputs, "hidden_states": branch.inputs["hidden_states"] * scale}
        expected = engine._sharded.forward(replace(branch, inputs=inputs), engine.division.team((0,)))
        (answer,) = engine.predict((replace(branch, inputs=inputs),), (0,))
        assert relative_difference(answer, expected) < 1e-4
    engine.close()


@pytest.mark.parametrize("num_kept", [1, 2])
@pytest.mark.parametrize("fast", [True, False])
def test_graphs_of_shapes_that_went_leave_the_others_right(fast: bool, num_kept: int) -> None:
    model, branch = on_gpu(torch.float32)
    engine = TorchEngine(model, fast=fast, compiled=False)
    with patch.object(steps, "MAX_SHAPES", num_kept):
        for length in (3, 4, 3, 5, 4, 3, 5):
            texts = {name: branch.inputs[name][..., :length, :] for name in ("encoder_hidden_states", "txt_ids")}
            shorter = replace(branch, inputs={**branch.inputs, **texts})
            expected = engine._sharded.forward(shorter, engine.division.team((0,)))
            for _ in range(3):
                (answer,) = engine.predict((shorter,), (0,))
                assert relative_difference(answer, expected) < 1e-4
    engine.close()


def test_half_precision_is_as_exact_as_the_modules() -> None:
    (exact,) = predict(torch.float32, fast=False)
    errors = {fast: relative_difference(predict(torch.bfloat16, fast)[0].float(), exact) for fast in (False, True)}
    assert errors[True] <= 1.2 * errors[False], errors


@torch.no_grad()
def test_gelu_in_the_product_is_as_exact() -> None:
    layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(approximate="tanh")).to("cuda", torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    exact = layers.float()(x.float())
    layers.to(torch.bfloat16)
    compiled = torch.compile(layers, fullgraph=True, backend=with_rewrites("inductor"))
    with profile() as events:
        answer = compiled(x)
    assert any("gelu_product" in event.key for event in events.key_averages())
    assert relative_difference(answer.float(), exact) <= 1.1 * relative_difference(layers(x).float(), exact)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("visible", ["all", "hidden"])
def test_ranks_share_memory(visible: str) -> None:
    """It holds for every path, uncaptured, captured and replayed, and if ranks see only their own GPU."""
    module = "tests.engines.torch_engine.support.peer_check"
    num_ranks = 4 if torch.cuda.device_count() >= 4 else 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command = [*launcher, "-m", module, visible]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("all agree") == num_ranks
