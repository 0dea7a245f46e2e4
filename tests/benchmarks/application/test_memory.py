"""Memory of a GPU is sampled, and its highest value is returned."""

from __future__ import annotations

from threading import Event

import pytest

from benchmarks.application import memory
from benchmarks.application.memory import Peak, peak_memory
from tests.support.patience import PATIENCE_S

GIB = 2**30


def test_the_highest_of_what_was_seen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held, was_seen = [3 * GIB], Event()

    def look() -> int:
        if held[0] == 9 * GIB:
            was_seen.set()
        return held[0]

    monkeypatch.setattr(memory, "held_bytes", look)
    monkeypatch.setattr(memory, "EVERY_S", 0.001)
    with peak_memory() as peak:
        held[0] = 9 * GIB
        assert was_seen.wait(PATIENCE_S)
        held[0] = 4 * GIB
    assert peak.rounded() == {"before": 3.0, "highest": 9.0, "after": 4.0}


def test_what_is_held_in_the_end_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter((1, 5))
    monkeypatch.setattr(memory, "held_bytes", lambda: next(values))
    monkeypatch.setattr(memory, "EVERY_S", 3600.0)
    with peak_memory() as peak:
        pass
    assert peak == Peak(before=1, highest=5, after=5)
