"""Convert a call's keyword arguments to tensors and constants by name, and back.

Names of values inside lists and dicts are paths: the first tensor of the list ``x`` is ``x.0``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from engines.core.model import Arguments


def split(call: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the constants of ``call``, both without None."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in _leaves("", call):
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            constants[name] = value
    return tensors, constants


def nested(arguments: Arguments) -> dict[str, Any]:
    """Return the keyword arguments whose ``split`` is ``arguments``; tuples that held tensors come back as lists."""
    call: dict[str, Any] = {}
    for name, value in arguments.items():
        *folders, last = name.split(".")
        place = call
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return {name: value if name in arguments else _with_lists(value) for name, value in call.items()}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and _holds_tensors(value):
        items = dict(enumerate(value)).items()
    elif value is None:
        return
    else:
        yield path, value
        return
    for name, inner in items:
        yield from _leaves(f"{path}.{name}" if path else str(name), inner)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


def _with_lists(value: Any) -> Any:
    """Return ``value`` with lists in place of dicts whose keys count from 0."""
    if not isinstance(value, dict):
        return value
    inner = {name: _with_lists(x) for name, x in value.items()}
    places = [str(number) for number in range(len(inner))]
    return [inner[place] for place in places] if inner and inner.keys() == set(places) else inner
