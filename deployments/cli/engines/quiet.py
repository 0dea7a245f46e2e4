"""Commands that print a result alone: libraries' warnings are for those who call libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside the block diffusers and transformers log errors alone, and Python's warnings are not shown.

    Both are imported here: each sets its own level as it is imported.
    """
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
