"""Levels of other libraries' loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_level(level: int, *names: str) -> Iterator[None]:
    """Inside the block the loggers ``names`` have ``level``; behind it they have their own again."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, own in zip(loggers, levels, strict=True):
            logger.setLevel(own)
