"""Cost of a step beside its forwards: it is measured, and it is small."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.model_step import overhead
from pipelines.blocks.sampler import BlocksSampler
from tests.pipelines.support.checkpoints import tiny, tiny_cosmos, tiny_models

MAKERS = {"flux": (tiny.flux, 1), "qwen": (tiny_models.qwen_image, 2), "cosmos 3": (tiny_cosmos.cosmos, 2)}
PATIENCE = 10
"""Factor by which it may take longer here, beside other programs and on slower machines."""
ADDED_MS = 30.0


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_costs_little(name: str, tmp_path: Path) -> None:
    make, branches = MAKERS[name]
    result = overhead.result_of(str(make(tmp_path)), 1)
    assert result["branches"] == branches
    record, answer, step = (result[key]["median_ms"] for key in ("record_ms", "answer_ms", "step_ms"))
    assert 0 < record < step
    assert 0 < answer < step < PATIENCE * overhead.LIMIT_MS


def busy(ms: float) -> None:
    end_s = time.thread_time() + ms / 1000
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize(("pass_of_step", "key"), [("branches", "record_ms"), ("advance", "answer_ms")])
def test_what_is_added_to_a_pass_is_seen_there(pass_of_step: str, key: str, tmp_path: Path) -> None:
    own: Callable[..., object] = getattr(BlocksSampler, pass_of_step)

    def slower(*args: object) -> object:
        busy(ADDED_MS)
        return own(*args)

    folder = str(tiny.flux(tmp_path))
    with patch.object(BlocksSampler, pass_of_step, slower):
        result = overhead.result_of(folder, 1)
    other = "answer_ms" if key == "record_ms" else "record_ms"
    assert result[key]["median_ms"] >= ADDED_MS > result[other]["median_ms"]
    assert result["step_ms"]["median_ms"] >= ADDED_MS


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(tiny.flux(tmp_path / "model")), tmp_path / "out.json"
    with patch("sys.argv", ["overhead", folder, "--jobs", "1", "--out", str(out)]):
        overhead.main()
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    (result,) = document["results"]
    assert (result["model"], result["step_ms"]["num_repeats"] > 10) == (folder, True)
    assert result["within_limit"] is (result["step_ms"]["median_ms"] <= overhead.LIMIT_MS)
    assert json.loads(out.read_text()) == document
