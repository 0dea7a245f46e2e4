"""Structured logs: one JSON object per line, with the id of its request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter

request_id_var: ContextVar[str] = ContextVar("troupe_request_id", default="")

LOGGERS = ("troupe", "deployments", "engines", "pipelines")
"""Roots of the project's loggers: one for events of the application, one for each package."""


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Add ``request_id`` to log lines of the block and of tasks that start in it."""
    token = request_id_var.set(request_id)
    try:
        yield
    finally:
        request_id_var.reset(token)


class JsonLines(JsonFormatter):
    """Format a record as one line of JSON: time (UTC), level, request_id, logger, message, and fields of ``extra``."""

    def __init__(self) -> None:
        names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
        super().__init__(["levelname", "name", "message"], rename_fields=names, timestamp="time")

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        first = {"time": log_data.pop("time"), "level": log_data.pop("level").lower()}
        if request_id := log_data.pop("request_id", "") or request_id_var.get():
            first["request_id"] = request_id
        return first | log_data


def configure_logs(stream: TextIO | None = None) -> logging.Handler:
    """Write all logs of the project to ``stream`` (stderr) as JSON lines. A second call replaces the handler."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return handler
