"""What is wrong with a request: for people, for programs, and which field it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

B = TypeVar("B", bound=BaseModel)


MAX_PARAM_CHARS = 80
"""Of a field's name in an answer: clients may send names of any length."""


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


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Turns the model's own refusals inside the block into ones that name the field of the body."""
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error), param) from None


def shown(value: object) -> str:
    """Returns ``value`` for a message: quoted, short, and printable whatever the client sent."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def validated(body_type: type[B], fields: Any) -> B:
    """Returns ``fields`` as checked types. RequestError names the first that is wrong."""
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise field_error(error.errors(), body_type.model_fields) from None


def field_error(errors: Collection[Mapping[str, Any]], fields: Collection[str]) -> RequestError:
    """Returns the first of pydantic's ``errors`` as one that names the field; ``fields`` are the allowed fields."""
    first = next(iter(errors))
    path = [str(part) for part in first["loc"] if part not in ("query", "path", "header")]
    param = ascii(path[0])[1:-1][:MAX_PARAM_CHARS] if path else None
    if first["type"] == "extra_forbidden":
        hint = f"; known fields: {', '.join(fields)}" if fields else ""
        return RequestError(f"Unknown field {shown(path[0])}{hint}", param, code="unknown_field")
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param, code="missing_field")
    if param is None:
        return RequestError(f"The body must be a JSON object with the fields {', '.join(fields)}")
    return RequestError(f"{param} is {shown(first.get('input'))}: {first['msg']}", param)
