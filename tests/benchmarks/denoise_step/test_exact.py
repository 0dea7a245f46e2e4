"""Errors of every strategy against float32: on a CPU all are the module's own answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.denoise_step.exact import makers


@pytest.mark.slow
def test_every_strategy_is_compared_at_every_length(tmp_path: Path) -> None:
    out = tmp_path / "exact.json"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *ranks, "-m", "benchmarks.denoise_step.exact", "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    document = json.loads(out.read_text())
    assert [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")] == [document]
    assert [each["error"] for each in document["results"] if "error" in each] == []
    found = [(each["strategy"], each["num_ranks"], each["length"]) for each in document["results"]]
    sizes = [(num_ranks, length) for num_ranks in (1, 2) for length in ("even", "uneven")]
    assert sorted(found) == sorted((label, *size) for label in makers(on_gpu=False) for size in sizes)
    assert max(each["relative_error"] for each in document["results"]) < 1e-5
