"""Faults follow each other, each is kept as soon as it is over, and other bytes are a failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import recovery
from benchmarks.faults.recovery import Answer
from deployments.config import ServeConfig


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was struck; the second fault changes the bytes, and after the third the program is ended."""
    struck: list[str] = []

    @contextmanager
    def serving(config: ServeConfig) -> Iterator[Any]:
        (model,) = config.app.models
        assert (model.path, model.denoiser.elastic) == (str(tmp_path), False)
        yield SimpleNamespace(url="", logs=tmp_path, memory=lambda: SimpleNamespace(pss_bytes=2**30))

    def ask(url: str, model: str, num_steps: int, at_step: Callable[[int], None] = lambda step: None) -> Answer:
        at_step(recovery.STRIKE_AT_STEP)
        if len(struck) == 3:
            raise SystemExit(143)
        data = b"others" if len(struck) == 2 else b"as usual"
        return Answer(began_s=0.0, ended_s=1.0, data=data, steps=[(1, float("inf"))])

    monkeypatch.setattr(recovery, "serving", serving)
    monkeypatch.setattr(recovery, "ask", ask)
    monkeypatch.setattr(recovery, "spans", lambda *_: [])
    faults = {name: lambda name=name: struck.append(name) for name in ("one", "two", "three")}
    monkeypatch.setattr(recovery, "faults", lambda *_: faults)
    return struck


def test_each_fault_is_kept_when_it_is_over(tmp_path: Path, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config", "gpu2", "--set", "denoiser.elastic=false", "--rest-s", "0"]
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["recovery", *words, "--folder", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        recovery.main()
    assert end.value.code == 143
    assert served == ["one", "two", "three"]
    document = json.loads(out.read_text())
    assert (document["model"], document["pss_gib"]) == ("full", 1.0)
    assert [(one["fault"], one["same_bytes"]) for one in document["recoveries"]] == [("one", True), ("two", False)]
