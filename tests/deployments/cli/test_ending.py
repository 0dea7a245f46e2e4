"""While the application starts, a Ctrl-C waits for the end of what cannot be undone half-way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from deployments.cli.errors import interrupts_later


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    """Reset the handler of SIGINT: shells let background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(reached: list[str], error: Exception | None = None) -> None:
    with interrupts_later():
        interrupt()
        reached.append("the end of the block")
        if error is not None:
            raise error
    reached.append("what follows")


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(reached)
    assert reached == ["the end of the block"]


def test_an_error_in_the_block_comes_first() -> None:
    with pytest.raises(ValueError, match="mine"):
        interrupted([], ValueError("mine"))


def test_afterwards_all_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_later():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    """``nohup`` does this, and shells do for background processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reached: list[str] = []
    interrupted(reached)
    assert reached == ["the end of the block", "what follows"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_may_use_it() -> None:
    entered = threading.Event()

    def enter() -> None:
        with interrupts_later():
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered.is_set()
