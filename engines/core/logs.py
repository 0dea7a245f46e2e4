"""Levels of other libraries' loggers, and one log line with the duration of each start-up phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_level(level: int, *names: str) -> Iterator[None]:
    """Set the loggers ``names`` to ``level`` inside the block."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, previous in zip(loggers, levels, strict=True):
            logger.setLevel(previous)


MESSAGE = "phase is over"

logger = logging.getLogger(__name__)


@contextmanager
def timed(phase: str, **fields: object) -> Iterator[None]:
    """Log the duration of the block, with ``fields``, unless it raises."""
    begun_s = time.monotonic()
    yield
    log_phase(phase, time.monotonic() - begun_s, **fields)


def log_phase(phase: str, took_s: float, **fields: object) -> None:
    """Log that ``phase`` ended after ``took_s`` seconds."""
    logger.info(MESSAGE, extra={"phase": phase, "took_s": round(took_s, 3), **fields})
