"""A small thread pool of a stage: Serve calls from one thread per request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """A pool of ``num_threads`` that runs the work of all callers.

    glibc's per-thread arenas keep freed memory: large work in many threads would grow the process by all of it.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` and return its result. Log lines carry the caller's request id."""
        context = copy_context()
        return self._pool.submit(lambda: context.run(work, *args, **kwargs)).result()

    def begin(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, without waiting."""
        self._pool.submit(work)
