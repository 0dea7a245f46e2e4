"""Turns of gangs that meet in a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.turns import Meeting
from tests.support.patience import PATIENCE_S


def of_turn(turn: int, folder: Path, size: int = 2, rank: int = 0) -> Meeting:
    return Meeting(folder=folder, size=size, turn=turn, rank=rank)


def test_a_gang_is_timed_when_all_are_ready_and_those_before_it_done(tmp_path: Path) -> None:
    for name in ("ready-0-0", "done-0-0"):
        (tmp_path / name).touch()
    second = of_turn(1, tmp_path)
    assert not second.was_ready()
    second.begin()
    assert second.was_ready()


@pytest.mark.parametrize("there", ["ready-2-0", "done-0-0"], ids=["a turn is not over", "one is not ready"])
def test_a_gang_that_waits_in_vain_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str) -> None:
    monkeypatch.setattr(turns, "MOST_WAITED_S", 0.2)
    for name in ("ready-0-0", there):
        (tmp_path / name).touch()
    with pytest.raises(TimeoutError, match="nothing was timed"):
        of_turn(1, tmp_path, size=3).begin()


def test_nobody_waits_for_a_gang_that_has_left(tmp_path: Path) -> None:
    of_turn(0, tmp_path).leave()
    assert of_turn(0, tmp_path).was_ready()
    second = of_turn(1, tmp_path)
    second.begin()
    second.end()
    second.begin()


def test_other_ranks_than_the_first_only_watch(tmp_path: Path) -> None:
    of_turn(0, tmp_path, size=1).begin()
    of_turn(0, tmp_path, size=1, rank=1).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["ready-0-0"]


def test_who_failed_before_it_was_ready_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(turns, "MOST_WAITED_S", 0.2)
    first, second = of_turn(0, tmp_path), of_turn(1, tmp_path)
    with pytest.raises(TimeoutError):
        first.end()
    second.begin()


def test_gangs_of_several_rounds_neither_prepare_nor_are_timed_beside_one_that_is_timed(tmp_path: Path) -> None:
    num_gangs, num_rounds = 3, 3
    said: list[tuple[str, int, int]] = []

    def go(turn: int) -> None:
        meeting = of_turn(turn, tmp_path, size=num_gangs)
        for number in range(num_rounds if turn else num_rounds - 1):  # the first has one round less
            said.append(("prepares", turn, number))
            meeting.begin()
            said.append(("is timed", turn, number))
            said.append(("was timed", turn, number))
            meeting.end()
        meeting.leave()

    threads = [threading.Thread(target=go, args=(turn,)) for turn in range(num_gangs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    expected = []
    for number in range(num_rounds):
        there = range(num_gangs) if number < num_rounds - 1 else range(1, num_gangs)
        expected += [{("prepares", turn, number) for turn in there}]
        expected += [{(state, turn, number)} for turn in there for state in ("is timed", "was timed")]
    for together in expected:
        assert {said.pop(0) for _ in together} == together
    assert said == []
