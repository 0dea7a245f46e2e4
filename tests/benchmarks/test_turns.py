"""Whose turn it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import turns


def test_a_gang_is_timed_when_all_are_ready_and_those_before_it_done(tmp_path: Path) -> None:
    for name in ("ready-0", "done-0"):
        (tmp_path / name).touch()
    turns.meet(tmp_path, 2, 1, rank=0)
    assert (tmp_path / "ready-1").exists()


@pytest.mark.parametrize("there", ["ready-2", "done-0"], ids=["a turn is not over", "one is not ready"])
def test_a_gang_that_waits_in_vain_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str) -> None:
    monkeypatch.setattr(turns, "MOST_WAITED_S", 0.2)
    for name in ("ready-0", there):
        (tmp_path / name).touch()
    with pytest.raises(TimeoutError, match="nothing was timed"):
        turns.meet(tmp_path, 3, 1, rank=0)


def test_nobody_waits_for_a_gang_that_has_left(tmp_path: Path) -> None:
    turns.leave(tmp_path, 0)
    assert turns.is_ready(tmp_path, 0)
    assert not turns.is_ready(tmp_path, 1)
    turns.meet(tmp_path, 2, 1, rank=0)
    assert turns.is_ready(tmp_path, 1)
