"""An application that has started comes to rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.serving import application
from benchmarks.serving.application import REST_CORES, REST_LOOKS, Application

QUIET, BUSY = 0.4 * REST_CORES, 2 * REST_CORES


def rests(shares: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``rest`` with these numbers of cores in use."""
    monkeypatch.setattr(Application, "cpu_share", lambda _self, _over_s: next(shares))
    one = Application(url="", ready_s=1.0, process=psutil.Process(), logs=Path(), data_dir=Path())
    one.rest()


def test_it_is_at_rest_once_all_that_starts_later_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([*[QUIET] * (REST_LOOKS - 1), BUSY, *[QUIET] * REST_LOOKS, BUSY])
    rests(shares, monkeypatch)
    assert list(shares) == [BUSY]


def test_one_that_is_never_at_rest_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(application, "AT_REST_WITHIN_S", 0.0)
    rests(iter([BUSY]), monkeypatch)
    assert "not at rest within 0 s" in capsys.readouterr().err
