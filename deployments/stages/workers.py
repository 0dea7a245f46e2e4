"""Threads of a stage's own, since Serve calls from a pool with as many as there are requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """``num_threads`` that do the work of all callers, each of whom waits for its own.

    glibc gives each thread an arena of memory, which keeps what was freed in it: where work that takes hundreds of MiB
    is done in one thread after the other, a process grows by them all.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what ``work`` does, or raises it. Log lines carry the caller's request id."""
        context = copy_context()
        return self._pool.submit(lambda: context.run(work, *args, **kwargs)).result()

    def begin(self, work: Callable[[], None]) -> None:
        """Have ``work`` done, for which nobody waits: it must not raise."""
        self._pool.submit(work)
