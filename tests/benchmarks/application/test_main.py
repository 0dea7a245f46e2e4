"""Requested parts are measured even if one fails, and each result is written at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.application import __main__ as program
from benchmarks.application import parts
from benchmarks.application.parts import Visit
from deployments.config import ServeConfig

DECIDED = {"message": "strategy is decided: 2: ulysses2", "times_ms": {"ulysses2": 1.5}, "file": "f"}


def log(folder: Path, *records: dict[str, Any]) -> Path:
    lines = [json.dumps({"time": "2026-11-23T00:00:00+00:00", **record}) for record in records]
    (folder / "worker-1.err").write_text("\n".join(lines))
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """Return the served configurations, of a model in ``tmp_path``."""
    configs: list[ServeConfig] = []

    @contextmanager
    def serving(config: ServeConfig) -> Iterator[Any]:
        configs.append(config)
        yield SimpleNamespace(url="http://127.0.0.1:9", ready_s=1.0, logs=log(tmp_path, DECIDED, DECIDED))

    def out_of_memory(visit: Visit) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(program, "serving", serving)
    monkeypatch.setattr(Visit, "card", {"id": "full", "kind": "image", "defaults": {"num_inference_steps": 28}})
    monkeypatch.setitem(parts.PARTS, "jpeg", lambda visit: {"jpeg": visit.client.side})
    monkeypatch.setitem(parts.PARTS, "double_side", out_of_memory)
    monkeypatch.setitem(parts.PARTS, "kill", lambda visit: {"after_a_kill": 1.0})
    return configs


def run(folder: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as end:
        program.main(["m", "--folder", str(folder), "--side", "96", "--out", str(folder / "out"), *words])
    return int(end.value.code or 0)


def test_parts_that_work_are_told(
    tmp_path: Path, served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--parts", "kill,jpeg", "--set", "denoiser.elastic=true") == 0
    (model,) = served[0].app.models
    assert (model.path, model.denoiser.num_ranks, model.denoiser.elastic) == (str(tmp_path), 2, True)
    *told, document = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one for one in told if "jpeg" in one or "after_a_kill" in one] == [{"jpeg": 96}, {"after_a_kill": 1.0}]
    assert document["strategy"] == [{name: DECIDED[name] for name in ("message", "times_ms")}]
    assert (document["steps"], document["jpeg"], document["after_a_kill"]) == (28, 96, 1.0)
    assert json.loads((tmp_path / "out").read_text()) == document


def test_parts_are_told_what_they_are_asked_for(
    tmp_path: Path, served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parts.PARTS, "at_once", lambda visit: {"at_once": [visit.at_once, *map(str, visit.clips)]})
    assert run(tmp_path, "--parts", "at_once,clips", "--at-once", "16", "--clip", "832x480x17@8", "832x480x81") == 0
    document = json.loads((tmp_path / "out").read_text())
    assert document["at_once"] == [16, "832x480x17@8", "832x480x81"]
    assert document["clips"] is None, "a model of pictures makes none"


def test_a_model_of_the_configuration_runs_beside_its_others(
    tmp_path: Path, served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(parts.PARTS, "jpeg", lambda visit: {"jpeg": visit.client.model})
    words = ["wan-shapes", "--config", "laptop", "--parts", "jpeg", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        program.main(words)
    assert {"flux-shapes", "wan-shapes"} < {model.name for model in served[0].app.models}
    assert json.loads((tmp_path / "out").read_text())["jpeg"] == "wan-shapes"


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, served: list[ServeConfig]) -> None:
    assert run(tmp_path, "--parts", "jpeg,double_side,kill") == 1
    document = json.loads((tmp_path / "out").read_text())
    assert document["failed"] == {"double_side": "RuntimeError('out of memory')"}
    assert (document["jpeg"], document["after_a_kill"]) == (96, 1.0)


def test_an_end_in_the_middle_leaves_what_was_there(
    tmp_path: Path, served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(visit: Visit) -> dict[str, Any]:
        raise SystemExit(143)

    monkeypatch.setitem(parts.PARTS, "double_side", end)
    assert run(tmp_path, "--parts", "jpeg,double_side,kill") == 143
    document = json.loads((tmp_path / "out").read_text())
    assert document["jpeg"] == 96
    assert "after_a_kill" not in document


def test_unknown_parts_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse(["--parts", "jpeg,gif"])
    assert "unknown part 'gif'; known: pictures, jpeg, half_side" in capsys.readouterr().err


def test_what_is_not_decided_is_nothing(tmp_path: Path) -> None:
    assert program.decided(log(tmp_path, {"message": "gang is ready"})) == []
    again = {"message": "strategy as it was decided: 2: ulysses2", "file": "f"}
    assert program.decided(log(tmp_path, again)) == [{"message": "strategy as it was decided: 2: ulysses2"}]
