"""What requests take alone: measured before a load, or read from what another run left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.__main__ import main, parse
from benchmarks.load.alone import NUM_LONE, Alone, measured
from benchmarks.load.mix import RequestClass
from tests.benchmarks.load.support.server import Server

RIGHT, WRONG = RequestClass(name="a", body={"prompt": "a"}), RequestClass(name="b", kind="clip", body={})


def run_of(url: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What ``main`` prints at the end, of two requests of one class."""
    Server.seen.clear()
    Server.expected = 1
    (folder / "mix.yaml").write_text("classes: [{name: a, body: {prompt: a}}]")
    told = ["--url", url, "--mix", str(folder / "mix.yaml"), "--burst", "2", "--every-s", "1", "--duration-s", "1"]
    main([*told, *words])
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_what_a_class_takes_alone_is_measured_or_read(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both benchmarks read what either wrote, a run with metrics knows the ranks as well."""
    first = run_of(url, tmp_path, capsys, "--metrics", f"{url}/metrics")
    found = first["alone"]["a"]
    assert (len(Server.seen), found["num_ranks"], found["num_steps"]) == (1 + NUM_LONE + 2, 2, 5)
    assert first["classes"]["a"]["lone_s"] == pytest.approx(Alone(**found).lone_s, abs=1e-4)
    assert Alone(**found).step_s == pytest.approx(0.001), "5 ms of 5 steps"
    file = tmp_path / "of_live"
    file.write_text(json.dumps({"rows": [], "alone": {"a": {**found, "other_s": 2.0}, "unasked": found}}))
    second = run_of(url, tmp_path, capsys, "--alone", str(file))
    assert len(Server.seen) == 2, "nothing is measured again"
    assert {name: one["lone_s"] for name, one in second["classes"].items()} == {"a": 2.005}
    assert second["alone"] == json.loads(file.read_text())["alone"]
    assert run_of(url, tmp_path, capsys)["alone"]["a"]["num_ranks"] == 0, "there were no metrics"


def test_lone_times_are_of_answers_that_are_right(url: str) -> None:
    Server.expected = 1
    with pytest.raises(RuntimeError, match="class b alone was answered 429"):
        asyncio.run(measured(url, lambda: "", (RIGHT, WRONG), {}))


def test_a_file_that_is_not_there_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--alone", "nowhere.json"])
    assert "nowhere.json is no file that a run of benchmarks.load or benchmarks.policies.live left" in (
        capsys.readouterr().err
    )
