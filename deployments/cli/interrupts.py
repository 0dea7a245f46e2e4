"""Ctrl-C, but not in the middle of things that cannot be undone half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_later() -> Iterator[None]:
    """A Ctrl-C inside the block is a KeyboardInterrupt at its end.

    For blocks that fork: an interrupted child prints a traceback before it has become what it was forked for. In other
    threads than the main one, where Python handles no signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt
