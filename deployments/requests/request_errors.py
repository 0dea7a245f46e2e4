"""Errors of requests: a message, a code, and the field to blame."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

MAX_SHOWN_CHARS = 80


class RequestError(ValueError):
    """A request that cannot be served as it is. ``message`` says what was given, what is allowed and what to change.

    ``param`` is the field to blame, None for the whole. Survives pickling, for callers in other processes.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


def is_user_error(error: BaseException) -> bool:
    """Return whether a request is to blame: the client is told ``error``, and the log needs no traceback."""
    return isinstance(error, ValueError) and not isinstance(error, UnicodeError | ValidationError)


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Turn ValueErrors of the model inside the block into ones that name the field ``param``."""
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error), param) from None


def shown(value: object) -> str:
    """Return ``value`` for a message: as JSON has it but text in single quotes, short, and printable."""
    if isinstance(value, str):
        return f"'{printable(value)}'"
    return cut(json.dumps(value, default=str))


def printable(text: str) -> str:
    """Return ``text``, short, with all that is no visible character escaped."""
    return cut(escaped(text[: MAX_SHOWN_CHARS + 1]))


def escaped(text: str) -> str:
    """Return ``text`` with all that is no visible character escaped."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."
