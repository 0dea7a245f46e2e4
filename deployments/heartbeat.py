"""Liveness checks of a process, once a second: a stopped or hanging process is ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

EVERY_S, ANSWER_WITHIN_S = 1.0, 2.0
MAX_MISSES = 3
"""Consecutive misses; a process that never answers is ended after nine seconds, one that is known to be stopped after
four at most."""

logger = logging.getLogger("troupe.heartbeat")


class Heartbeat:
    """A thread that checks a process from ``start`` until ``stop``; a context manager does both.

    ``answers`` returns whether the process answered, within ``ANSWER_WITHIN_S``. ``end`` is called after every
    ``MAX_MISSES`` consecutive misses. An exception in ``answers`` is a miss; one in ``end`` is logged.
    """

    def __init__(self, what: str, answers: Callable[[], bool], end: Callable[[], None]) -> None:
        self._what, self._answers, self._end = what, answers, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"heartbeat of {what}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop checking; a check may still be running."""
        self._stopped.set()

    def _run(self) -> None:
        num_misses = 0
        while not self._stopped.wait(EVERY_S):
            num_misses = 0 if self._is_alive() else num_misses + 1
            if num_misses == MAX_MISSES and not self._stopped.is_set():
                num_misses = 0
                logger.warning("a process does not answer and is ended", extra={"watched": self._what})
                try:
                    self._end()
                except Exception:
                    logger.exception("a process could not be ended", extra={"watched": self._what})

    def _is_alive(self) -> bool:
        try:
            return self._answers()
        except Exception as error:
            logger.debug("a process did not answer: %r", error, extra={"watched": self._what})
            return False
