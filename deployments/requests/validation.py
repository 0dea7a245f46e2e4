"""Checked bodies from the fields that a client sent; the first wrong field becomes a ``RequestError``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from deployments.requests.bodies import EditBody, ImageBody, PeerFields
from deployments.requests.request_errors import RequestError, printable, shown
from deployments.requests.untrusted import json_value

B = TypeVar("B", bound=BaseModel)

EXTRA = "extra_body"
EXTRA_SENTENCE = 'it must be a JSON object with further fields, such as {"seed": 7}'
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
"""Pydantic's errors, in words that do not depend on this server's code."""


def validated(body_type: type[B], fields: Any) -> B:
    """Return ``fields`` as checked types; None counts as absent. RequestError names the first wrong field."""
    if isinstance(fields, Mapping):
        fields = _with_one_unknown({name: value for name, value in fields.items() if value is not None}, body_type)
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise first_error(error.errors(), body_type.model_fields) from None


def validated_form(
    body_type: type[B], fields: Mapping[str, str], pictures: Mapping[str, Sequence[bytes | str]] = NOTHING
) -> B:
    """Like ``validated``, for a form: text, and ``pictures``. An empty field counts as absent."""
    fields = _with_one_unknown({name: text for name, text in fields.items() if text}, body_type)
    try:
        body = body_type.model_validate_strings(fields)
        for name, values in pictures.items():  # bytes, which are no strings to pydantic
            value = values[0] if len(values) == 1 else list(values)
            body_type.__pydantic_validator__.validate_assignment(body, name, value)
        return body
    except ValidationError as error:
        raise first_error(error.errors(), body_type.model_fields) from None


def _with_one_unknown(fields: Mapping[str, Any], body_type: type[BaseModel]) -> dict[str, Any]:
    """Return the known ``fields`` and the first other one: pydantic makes an error of a kilobyte for each."""
    known = body_type.model_fields
    unknown = next((name for name in fields if name not in known), None)
    return {name: value for name, value in fields.items() if name in known or name == unknown}


def first_error(errors: Collection[Mapping[str, Any]], fields: Mapping[str, FieldInfo]) -> RequestError:
    """Return the first of pydantic's ``errors`` as one that names the field; ``fields`` are the allowed fields."""
    first = next(iter(errors))
    path = [str(part) for part in first["loc"] if part not in ("query", "path", "header")]
    param = printable(path[0]) if path else None
    names = ", ".join(name for name, field in fields.items() if not is_peers(name, field))
    if first["type"] == "extra_forbidden" and fields is ImageBody.model_fields and param in EditBody.model_fields:
        message = f"{param} is for input pictures: send it to POST /v1/images/edits, or leave it out"
        return RequestError(message, param, code="unknown_field")
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
    """Return whether a field exists only for clients of other servers."""
    peers = PeerFields.model_fields.get(name)
    return peers is not None and peers.description == field.description


def _sentence(error: Mapping[str, Any], field: FieldInfo | None) -> str:
    """Return what the field must be: both ends of a range, whichever was crossed."""
    if error["type"] in ("greater_than_equal", "less_than_equal") and field is not None:
        low = [one.ge for one in field.metadata if isinstance(one, Ge)]
        high = [one.le for one in field.metadata if isinstance(one, Le)]
        if low and high:
            return f"it must be from {low[0]} to {high[0]}"
    return formatted(error, SENTENCES)


def formatted(error: Mapping[str, Any], sentences: Mapping[str, str]) -> str:
    """Return one of pydantic's errors as the sentence for its type, or as pydantic's own message."""
    if error["type"] not in sentences:
        return str(error["msg"])
    facts = {name: str(fact).replace("'", "") for name, fact in error.get("ctx", {}).items()}
    return sentences[error["type"]].format(**facts)


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return the name in ``known`` with a similar spelling, or with all words of ``name``; "" without one."""
    if len(name) > MAX_COMPARED_CHARS:
        return ""
    words = set(name.split("_"))
    alike = get_close_matches(name, known, n=1, cutoff=MIN_SIMILARITY)
    return next(iter(alike + [one for one in known if words < set(one.split("_"))]), "")


def unfolded(fields: Any) -> Any:
    """Return the ``fields`` of a body with the fields of its ``extra_body`` among them. Anything but an object is kept.

    RequestError if ``extra_body`` is no object, or contradicts a field of the body.
    """
    return _unfolded(fields, _object(fields[EXTRA])) if isinstance(fields, Mapping) and fields.get(EXTRA) else fields


def unfolded_form(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Like ``unfolded``, for a form: all values are text."""
    if not fields.get(EXTRA):
        return fields
    return _unfolded(fields, {name: _text(value) for name, value in _object(fields[EXTRA]).items()})


def _unfolded(fields: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in fields.items() if name != EXTRA and value not in (None, "")}
    for name, value in extra.items():
        if name == EXTRA:
            raise RequestError(f"{EXTRA} holds {EXTRA}: {EXTRA_SENTENCE}", EXTRA)
        if rest.setdefault(name, value) != value and value not in (None, ""):
            message = f"{name} is {shown(rest[name])}, but {shown(value)} in {EXTRA}; give one of them"
            raise RequestError(message, printable(name))
    return rest


def _object(written: object) -> Mapping[str, Any]:
    """Parse the value of a form, which is the text of its JSON."""
    try:
        read = json_value(written) if isinstance(written, str) else written
    except RequestError:
        raise
    except ValueError:
        read = None
    if not isinstance(read, Mapping):
        raise RequestError(f"{EXTRA} is {shown(written)}: {EXTRA_SENTENCE}", EXTRA)
    return read


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
