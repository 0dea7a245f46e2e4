"""What is wrong with a request: for people, for programs, and which field it is."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from deployments.requests.bodies import PeerFields

B = TypeVar("B", bound=BaseModel)

MAX_SHOWN_CHARS = 80
MIN_SIMILARITY = 0.75
MAX_COMPARED_CHARS = 100
"""Longer names are not compared, which takes quadratic time: they are no misspelt names."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
SENTENCES = {
    "string_type": "it must be text",
    "string_too_long": "it must have at most {max_length} characters",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it must be a whole number of at most 15 digits",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "literal_error": "it must be {expected}",
}
"""What pydantic finds, in words that do not depend on how this server is written."""


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
    """Returns ``value`` for a message: as JSON has it but text in single quotes, short, and printable."""
    if isinstance(value, str):
        return f"'{printable(value)}'"
    return cut(json.dumps(value, default=str))


def printable(text: str) -> str:
    """Returns ``text``, short, with all that is no visible character escaped."""
    return cut(escaped(text[: MAX_SHOWN_CHARS + 1]))


def escaped(text: str) -> str:
    """Returns ``text`` with all that is no visible character escaped."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def validated(body_type: type[B], fields: Any) -> B:
    """Returns ``fields`` as checked types; what is None counts as absent. RequestError names the first wrong one."""
    if isinstance(fields, Mapping):
        fields = {name: value for name, value in fields.items() if value is not None}
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise field_error(error.errors(), body_type.model_fields) from None


def validated_form(
    body_type: type[B], fields: Mapping[str, str], pictures: Mapping[str, Sequence[bytes | str]] = NOTHING
) -> B:
    """Returns what ``validated`` does, from text alone and from ``pictures``; an empty field counts as absent."""
    try:
        body = body_type.model_validate_strings({name: text for name, text in fields.items() if text})
        for name, values in pictures.items():  # bytes, which are no strings to pydantic
            value = values[0] if len(values) == 1 else list(values)
            body_type.__pydantic_validator__.validate_assignment(body, name, value)
        return body
    except ValidationError as error:
        raise field_error(error.errors(), body_type.model_fields) from None


def field_error(errors: Collection[Mapping[str, Any]], fields: Mapping[str, FieldInfo]) -> RequestError:
    """Returns the first of pydantic's ``errors`` as one that names the field; ``fields`` are the allowed fields."""
    first = next(iter(errors))
    path = [str(part) for part in first["loc"] if part not in ("query", "path", "header")]
    param = printable(path[0]) if path else None
    names = ", ".join(name for name, field in fields.items() if not is_peers(name, field))
    if first["type"] == "extra_forbidden":
        nearest = nearest_name(path[0], fields)
        known = f"known fields: {names}" if fields else ""
        hint = f": did you mean {nearest}? {known.capitalize()}" if nearest else f"; {known}"
        return RequestError(f"Unknown field {shown(path[0])}{hint.rstrip('; ')}", param, code="unknown_field")
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param, code="missing_field")
    if param is None:
        return RequestError(f"The body must be a JSON object with the fields {names}")
    return RequestError(f"{param} is {shown(first.get('input'))}: {_sentence(first, fields.get(path[0]))}", param)


def is_peers(name: str, field: FieldInfo) -> bool:
    """Returns whether a field is there for clients of other servers alone."""
    peers = PeerFields.model_fields.get(name)
    return peers is not None and peers.description == field.description


def _sentence(error: Mapping[str, Any], field: FieldInfo | None) -> str:
    """Returns what the field must be: both ends of a range, whichever was crossed."""
    if error["type"] in ("greater_than_equal", "less_than_equal") and field is not None:
        low = [one.ge for one in field.metadata if isinstance(one, Ge)]
        high = [one.le for one in field.metadata if isinstance(one, Le)]
        if low and high:
            return f"it must be from {low[0]} to {high[0]}"
    return formatted(error, SENTENCES)


def formatted(error: Mapping[str, Any], sentences: Mapping[str, str]) -> str:
    """Returns one of pydantic's errors as the sentence for its type, or as pydantic's own message."""
    if error["type"] not in sentences:
        return str(error["msg"])
    facts = {name: str(fact).replace("'", "") for name, fact in error.get("ctx", {}).items()}
    return sentences[error["type"]].format(**facts)


def nearest_name(name: str, known: Collection[str]) -> str:
    """Returns the name in ``known`` that is spelt alike, or has all words of ``name``; empty if there is none."""
    if len(name) > MAX_COMPARED_CHARS:
        return ""
    words = set(name.split("_"))
    alike = get_close_matches(name, known, n=1, cutoff=MIN_SIMILARITY)
    return next(iter(alike + [one for one in known if words < set(one.split("_"))]), "")
