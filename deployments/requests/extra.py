"""Fields that clients put into one of their own, ``extra_body``, where they belong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from deployments.requests.errors import RequestError, printable, shown

EXTRA = "extra_body"
SENTENCE = 'it must be a JSON object with further fields, such as {"seed": 7}'


def unfolded(fields: Any) -> Any:
    """Returns the ``fields`` of a body with those of ``extra_body`` beside them; what is no object, as it is.

    RequestError where ``extra_body`` is no object, or says something else than the field beside it.
    """
    return _unfolded(fields, _object(fields[EXTRA])) if isinstance(fields, Mapping) and fields.get(EXTRA) else fields


def unfolded_form(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Returns what ``unfolded`` does, as a form has it: all values are text."""
    if not fields.get(EXTRA):
        return fields
    return _unfolded(fields, {name: _text(value) for name, value in _object(fields[EXTRA]).items()})


def _unfolded(fields: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in fields.items() if name != EXTRA and value not in (None, "")}
    for name, value in extra.items():
        if name == EXTRA:
            raise RequestError(f"{EXTRA} holds {EXTRA}: {SENTENCE}", EXTRA)
        if rest.setdefault(name, value) != value and value not in (None, ""):
            message = f"{name} is {shown(rest[name])}, but {shown(value)} in {EXTRA}; give one of them"
            raise RequestError(message, printable(name))
    return rest


def _object(written: object) -> Mapping[str, Any]:
    """In a form it is the text of its JSON."""
    try:
        read = from_json(written, allow_inf_nan=False) if isinstance(written, str) else written
    except ValueError:
        read = None
    if not isinstance(read, Mapping):
        raise RequestError(f"{EXTRA} is {shown(written)}: {SENTENCE}", EXTRA)
    return read


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
