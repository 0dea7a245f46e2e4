"""TensorRT's messages: into Python's logging for debugging, and the errors kept for the exception that follows."""

from __future__ import annotations

import functools
import logging
from typing import Any

from engines.tensorrt_engine.build.bindings import load_bindings

logger = logging.getLogger("troupe.tensorrt")


@functools.cache
def _logger_class() -> type:
    trt = load_bindings().api
    failures = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

    class ErrorKeepingLogger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in failures:
                self.errors.append(message)
            if severity != trt.ILogger.VERBOSE:  # of warnings there are hundreds a build, none that a user can act on
                logger.debug("%s", message)

    return ErrorKeepingLogger


@functools.cache
def trt_logger() -> Any:
    """Returns the process's one ``ILogger`` (TensorRT keeps the first it gets); ``errors`` collects error messages."""
    return _logger_class()()


def take_errors() -> str:
    """Returns the error messages since the last call, as one line."""
    errors = trt_logger().errors
    text = "; ".join(dict.fromkeys(errors)).strip()
    errors.clear()
    return text
