"""Structured logs: one JSON object a line, each with the id of the request that it belongs to."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

request_id_var: ContextVar[str] = ContextVar("troupe_request_id", default="")

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}

LOGGERS = ("troupe", "deployments", "engines", "pipelines")
"""Roots of the project's loggers: one for what concerns requests, one for each package."""


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Log lines inside the block, tasks started there included, carry ``request_id``."""
    token = request_id_var.set(request_id)
    try:
        yield
    finally:
        request_id_var.reset(token)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, logger, message, request_id, and whatever ``extra`` holds."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", "") or request_id_var.get():
            fields["request_id"] = request_id
        fields |= {key: value for key, value in vars(record).items() if key not in STANDARD_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure_logs(level: int | str = "INFO", stream: TextIO | None = None) -> logging.Handler:
    """Send everything that the project logs to ``stream`` (stderr) as JSON lines. Calling it again replaces it."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
    return handler
