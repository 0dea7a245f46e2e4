"""TensorRT's messages: into Python's logging, and the errors kept for the exception that follows."""

from __future__ import annotations

import functools
import logging
from typing import Any

from engines.tensorrt_engine.build.bindings import load_bindings

logger = logging.getLogger("troupe.tensorrt")


@functools.cache
def _logger_class() -> type:
    trt = load_bindings().api
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.DEBUG,  # hundreds per build, none that a user can act on
        trt.ILogger.INFO: logging.DEBUG,
        trt.ILogger.VERBOSE: logging.NOTSET,
    }

    class ErrorKeepingLogger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level == logging.ERROR:
                self.errors.append(message)
            if level:
                logger.log(logging.DEBUG, "%s", message)

    return ErrorKeepingLogger


@functools.cache
def trt_logger() -> Any:
    """The process's one ``ILogger`` (TensorRT keeps the first it is given); ``errors`` collects error messages."""
    return _logger_class()()


def take_errors() -> str:
    """The error messages since the last call, as one line."""
    errors = trt_logger().errors
    text = "; ".join(dict.fromkeys(errors)).strip()
    errors.clear()
    return text
