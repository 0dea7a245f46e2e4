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


class Served:
    """Faults that are struck at an application that does not exist: at the one of ``bytes_change`` the picture has
    other bytes, at the one of ``ends`` the program is ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_change: int = 0, ends: int = 0) -> None:
        self.struck: list[str] = []
        self._bytes_change, self._ends = bytes_change, ends
        monkeypatch.setattr(recovery, "serving", self._serving)
        monkeypatch.setattr(recovery, "ask", self._ask)
        monkeypatch.setattr(recovery, "spans", lambda *_: [])
        faults = {name: lambda name=name: self.struck.append(name) for name in ("one", "two", "three")}
        monkeypatch.setattr(recovery, "faults", lambda *_: faults)

    @contextmanager
    def _serving(self, config: ServeConfig) -> Iterator[Any]:
        (model,) = config.app.models
        assert model.denoiser.elastic
        yield SimpleNamespace(url="", logs=Path(model.path), memory=lambda: SimpleNamespace(pss_bytes=2**30))

    def _ask(self, url: str, model: str, num_steps: int, at_step: Callable[[int], None] = lambda step: None) -> Answer:
        at_step(recovery.STRIKE_AT_STEP)
        number = len(self.struck)
        if number and number == self._ends:
            raise SystemExit(143)
        data = b"others" if number and number == self._bytes_change else b"as usual"
        return Answer(began_s=0.0, ended_s=1.0, data=data, steps=[(1, float("inf"))])


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    words = ["--config", "gpu2", "--set", "denoiser.elastic=true", "--rest-s", "0", "--out", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", ["recovery", *words, "--folder", str(folder)])
    with pytest.raises(SystemExit) as end:
        recovery.main()
    return int(end.value.code or 0), json.loads((folder / "out").read_text())


def test_each_fault_is_kept_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, ends=3)
    status, document = run(tmp_path, monkeypatch)
    assert (status, served.struck) == (143, ["one", "two", "three"])
    assert (document["model"], document["pss_gib"]) == ("full", 1.0)
    assert [one["fault"] for one in document["recoveries"]] == ["one", "two"]


@pytest.mark.parametrize("bytes_change", [0, 2])
def test_other_bytes_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_change: int) -> None:
    Served(monkeypatch, bytes_change=bytes_change)
    status, document = run(tmp_path, monkeypatch)
    assert status == bool(bytes_change)
    assert [one["same_bytes"] for one in document["recoveries"]] == [True, not bytes_change, True]
