"""Overrides of a model's defaults, in an optional ``troupe.json`` of its directory.

The file's keys are those of ``Defaults`` (all but ``FIXED``) and ``card`` (see ``description``). All are optional; an
unknown key is an error.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

from pipelines.defaults import Defaults
from pipelines.directory import DEFAULTS_FILE, read_own

CARD = "card"
"""The key of the model's description, which does not affect requests."""
DIVISORS = ("size_multiple", "frame_multiple", "fps")
FIXED = ("kind", "solver", "stage_scale", "chunk_overlap")
"""Values that the family's code fixes."""
KEYS = tuple(field.name for field in fields(Defaults) if field.name not in FIXED)


def with_own_defaults(path: Path, defaults: Defaults) -> Defaults:
    """Return ``defaults`` with the values of ``path/troupe.json``, if it exists.

    ValueError for unknown keys, for values of another type, and if the default request becomes invalid.
    """
    file, own = path / DEFAULTS_FILE, read_own(path)
    own.pop(CARD, None)
    if unknown := sorted(own.keys() - set(KEYS)):
        raise ValueError(f"{file} has unknown keys {', '.join(unknown)}; known: {', '.join((*KEYS, CARD))}")
    for name, value in own.items():
        usual = getattr(defaults, name)
        if type(value) is not type(usual) and (type(value), type(usual)) != (int, float):
            allowed = f"it must be a value such as {json.dumps(usual)}"
            raise ValueError(f"{file}: {name} is {json.dumps(value)}; {allowed}")
        if name in DIVISORS and value < 1 <= usual:
            raise ValueError(f"{file}: {name} is {value}; it must be at least 1")
    changed = replace(defaults, **own)
    if own:
        check(changed, file)
    return changed


def check(defaults: Defaults, file: Path) -> None:
    """Raise ValueError if the model refuses its own default request."""
    try:
        for kind in defaults.kinds:
            defaults.of(kind).request()
    except ValueError as error:
        raise ValueError(f"{file}: its values contradict each other: {error}") from None
