"""A process that does not answer is ended, under conditions."""

from __future__ import annotations

import threading

import pytest

from deployments import heartbeat
from deployments.heartbeat import MAX_MISSES, Heartbeat
from tests.deployments.support.live import wait_until


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.001)


def num_ends_after(answers: list[object]) -> int:
    """Return how often the process was ended after all of ``answers``."""
    ended, left, all_given = [0], list(answers), threading.Event()

    def answer() -> bool:
        if not left:
            all_given.set()
            return True
        now = left.pop(0)
        if isinstance(now, Exception):
            raise now
        return bool(now)

    def end() -> None:
        ended[0] += 1

    with Heartbeat("a process", answer, end):
        wait_until(all_given.is_set, "all answers were given")
    return ended[0]


@pytest.mark.parametrize(
    ("answers", "num_ends"),
    [
        ([True] * 5, 0),
        ([False] * (MAX_MISSES - 1), 0),
        ([False, False, True, False, False, True], 0),
        ([False] * MAX_MISSES, 1),
        ([TimeoutError()] * MAX_MISSES, 1),
        ([False] * MAX_MISSES * 2, 2),
    ],
)
def test_misses_in_a_row_end_a_process(answers: list[object], num_ends: int) -> None:
    assert num_ends_after(answers) == num_ends


def test_one_that_cannot_be_ended_is_tried_again() -> None:
    tries = threading.Semaphore(0)

    def end() -> None:
        tries.release()
        raise OSError("not permitted")

    with Heartbeat("a process", lambda: False, end):
        assert tries.acquire(timeout=60)
        assert tries.acquire(timeout=60)
