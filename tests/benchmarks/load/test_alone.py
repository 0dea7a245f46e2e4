"""Lone times are measured before a load, or read from an earlier run's file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.load.__main__ import main, parse
from benchmarks.load.alone import NUM_LONE, measured, read
from benchmarks.load.mix import RequestClass
from tests.benchmarks.load.support.server import Server

RIGHT, WRONG = RequestClass(name="a", body={"prompt": "a"}), RequestClass(name="b", kind="clip", body={})


def run_of(url: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document that ``main`` prints, of two requests of one class."""
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
    first = run_of(url, tmp_path, capsys, "--metrics", f"{url}/metrics", "--out", str(tmp_path / "out"))
    assert len(Server.seen) == 1 + NUM_LONE + 2
    assert first["alone"]["a"] > 0
    assert first["classes"]["a"]["lone_s"] == pytest.approx(first["alone"]["a"], abs=1e-4)
    assert first["share_in_steps"] > 0
    assert json.loads((tmp_path / "out").read_text()) == first
    file = tmp_path / "earlier"
    file.write_text(json.dumps({"rows": [], "alone": {"a": 2.0, "unasked": 1.0}}))
    second = run_of(url, tmp_path, capsys, "--alone", str(file))
    assert len(Server.seen) == 2, "nothing is measured again"
    assert {name: one["lone_s"] for name, one in second["classes"].items()} == {"a": 2.0}
    assert second["alone"] == {"a": 2.0, "unasked": 1.0}
    assert "share_in_steps" not in second, "there were no metrics"


def test_lone_times_are_of_answers_that_are_right(url: str) -> None:
    Server.expected = 1
    with pytest.raises(RuntimeError, match="class b alone was answered 429"):
        asyncio.run(measured(url, (RIGHT, WRONG), {}))


def test_what_was_printed_is_read_whole_in_part_and_at_the_end_of_output(tmp_path: Path) -> None:
    known, file = {"small": 1.5, "clip": 2.0}, tmp_path / "file"
    document = json.dumps({"rows": [], "alone": known})
    for text in (document, json.dumps(known, indent=1), f"{json.dumps({'row': 1})}\n{document}\n"):
        file.write_text(text)
        assert read(file) == known
    file.write_text(json.dumps({"small": {"step_s": 1.0}}))
    with pytest.raises(ValidationError):
        read(file)
    file.write_text("")
    with pytest.raises(ValueError, match="Expecting value"):
        read(file)


def test_a_file_that_is_not_there_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--alone", "nowhere.json"])
    assert "nowhere.json is no file that a run of benchmarks.load left" in capsys.readouterr().err
