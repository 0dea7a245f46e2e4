"""Processes that ``benchmarks.denoise_step.gpu`` starts, and what an earlier call has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.denoise_step import gpu
from benchmarks.denoise_step.stage import Run, Stage
from benchmarks.turns import Meeting
from tests.support.patience import PATIENCE_S


def test_what_an_earlier_call_has_left_is_neither_waited_for_nor_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "started.py").write_text("import os, sys\nprint(os.listdir(sys.argv[sys.argv.index('--meet') + 1]))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    meeting = tmp_path / "meeting-stage"
    meeting.mkdir()
    for left in (meeting / "ready-0-0", meeting / "done-0-0"):
        left.touch()
    (tmp_path / "run.json").write_text(json.dumps({"results": [{"case": "an earlier call's"}]}))
    stage = Stage(name="stage", runs=(Run(name="run", module="started"),), limit_s=60, takes_turns=True)
    (outcome,) = gpu.perform(stage, 0, 60, tmp_path).values()
    assert outcome.startswith("exit 0")
    assert (tmp_path / "run.log").read_text().strip() == "[]"
    assert gpu.collect(tmp_path) == []


NEVER_READY = "import time\nprint('compiling', flush=True)\ntime.sleep(600)"
TIMED_LAST = """
import json, pathlib, sys, time
value = lambda name, offset=1: sys.argv[sys.argv.index(name) + offset]
meeting = pathlib.Path(value("--meet"))
(meeting / f"ready-{value('--turn', 2)}-0").touch()
while not (meeting / "left-0").exists():
    time.sleep(0.05)
results = [{"case": "good", "median_ms": 1.0}, {"case": "bad", "error": "first\\nlast"}]
pathlib.Path(value("--out")).write_text(json.dumps({"results": results}))
"""


def test_who_is_not_ready_in_time_is_stopped_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "never_ready.py").write_text(NEVER_READY)
    (tmp_path / "timed_last.py").write_text(TIMED_LAST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "READY_SHARE", 0.0)
    monkeypatch.setattr(Meeting, "was_ready", lambda meeting: meeting.turn == 1)  # as soon as it can
    runs = tuple(Run(name=name, module=name) for name in ("never_ready", "timed_last"))
    limit_s = int(PATIENCE_S)
    outcome = gpu.perform(Stage(name="s", runs=runs, limit_s=limit_s, takes_turns=True), 0, limit_s, tmp_path)
    assert outcome["never_ready"].startswith("not ready")
    assert outcome["timed_last"].startswith("exit 0")
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"== timed_last: {outcome['timed_last']}",
        "bad FAILED:",
        "first",
        "last",
    ]


def test_gpus_are_counted_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(gpu.visible((0, 1))) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-8932f937")
    assert list(gpu.visible((1, 0))) == ["GPU-8932f937", "2"]


def test_only_stages_that_are_named_are_run_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "out", "--together", "--stages", "sglang_quad", "vllm_omni_quad"])
    assert gpu.parse().together
    monkeypatch.setattr("sys.argv", ["gpu", "out", "--together"])
    with pytest.raises(SystemExit):
        gpu.parse()
    assert "give --stages" in capsys.readouterr().err


def test_a_result_that_was_being_written_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"results": [{"ca')
    (tmp_path / "whole.json").write_text(json.dumps({"results": [{"case": "whole"}]}))
    assert gpu.collect(tmp_path) == [{"stage": "whole", "case": "whole"}]


def test_a_result_says_what_its_run_ran_on_and_beside(tmp_path: Path) -> None:
    facts = {"hardware": "1 x H200", "torch": "2.11", "python_s": 0.6}
    for name in ("best_one", "best_quad"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**facts, "results": [{"case": name}]}))
    one, four = gpu.collect(tmp_path)
    assert one == {"stage": "best_one", **facts, "case": "best_one", "runs_beside": 3}
    assert four == {"stage": "best_quad", **facts, "case": "best_quad"}


def test_what_a_compiler_tries_is_no_news() -> None:
    tried = (
        "AUTOTUNE addmm(128x256)",
        "  triton_mm_3 0.0216 ms 100.0% ",
        "strides: [0, 1]",
        "INFO 11-23 11:56:07 [compile]",
    )
    assert not any(gpu.is_news(line) for line in tried)
    assert gpu.is_news("fast/1024/w1/bf16   floor   94.10  median   118.30")
