"""Errors of requests that name a field."""

from __future__ import annotations


class FieldError(ValueError):
    """A value that is refused; ``field`` names the field of the request, or the part of a file. Survives pickling."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])
