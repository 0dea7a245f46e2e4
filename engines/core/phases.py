"""What a start's seconds go into: a line of log for each of its phases, as it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE = "phase is over"

logger = logging.getLogger(__name__)


@contextmanager
def timed(phase: str, **fields: object) -> Iterator[None]:
    """Logs how long the block lasted, with ``fields``, unless something is raised in it."""
    begun_s = time.monotonic()
    yield
    log_phase(phase, time.monotonic() - begun_s, **fields)


def log_phase(phase: str, took_s: float, **fields: object) -> None:
    """Logs that ``phase`` took so long, until now."""
    logger.info(MESSAGE, extra={"phase": phase, "took_s": round(took_s, 3), **fields})
