"""What is said of a model before anything is timed, and with its times."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.model_step.__main__ import Arguments, diffusers
from benchmarks.models.published import PublishedModel
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_qwen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_qwen.qwen(tmp_path_factory.mktemp("qwen")))


@pytest.mark.parametrize("branches", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_floor_comes_before_the_times_and_counts_every_branch(folder: str, branches: int) -> None:
    sizes = ["--size", "96x96", "--tokens", "20", "--repeats", "2", "--branches", str(branches)]
    command = [sys.executable, "-m", "benchmarks.model_step", folder, *sizes, "--makers", "eager", "ours"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    _, floor, *results, last = ended.stdout.splitlines()
    assert f"branches {branches}, ranks 1" in floor
    assert "floor_ms" in floor
    assert [json.loads(line)["maker"] for line in results] == ["diffusers eager", "ours, ulysses"]
    document = json.loads(last)
    assert document["results"] == [json.loads(line) for line in results]
    assert document["results"][1]["branches"] == branches
    assert document["results"][1]["relative_error"] < 1e-5


def test_what_diffusers_cannot_divide_is_said(folder: str) -> None:
    """It takes the accelerators' number for a divisor, and CPUs are none."""
    model = PublishedModel.made(folder, torch.device("cpu"), torch.float32, Size.parse("96x96"), 20, 1)
    with pytest.raises(ValueError, match="over GPUs alone, not over CPUs: leave it out of --makers"):
        diffusers(model, torch.zeros(1), Arguments(), 2)
