"""Errors of a configuration: one sentence each, with its path and the nearest known key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from deployments.requests.request_errors import shown
from deployments.requests.validation import SENTENCES, formatted, nearest_name

Place = tuple[str | int, ...]

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
SECTION = "it must be a section of keys and values"
CONFIG_SENTENCES = SENTENCES | {
    "too_short": "it must have at least {min_length} entry",
    "too_long": "it must have at most {max_length} entry",
    "greater_than": "it must be above {gt}",
    "tuple_type": "it must be a list",
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type"), SECTION),
}
ROOT: Place = ("applications", 0, "args")
"""The section of nearly all keys, omitted from paths."""
OFF = re.compile(r"\boff\b")
MODEL = "\0"
"""Placeholder of models' names in a path."""


def describe_errors(error: ValidationError, document: Any, schema: type[BaseModel]) -> list[str]:
    """Return a sentence for each mistake in ``document``, which ``schema`` rejects.

    A mistake in several models is one sentence with their names. Mistakes that follow from others are omitted.
    """
    errors = [one for one in error.errors() if not _follows(one, error.errors())]
    json_schema = schema.model_json_schema()
    misspelt = {(*one["loc"][:-1], _nearest_key(one, json_schema)) for one in errors if one["type"] in UNKNOWN}
    sentences: dict[str, list[str]] = {}
    for place, same in _by_value(errors, json_schema).items():
        if same[0]["type"] not in MISSING or place not in misspelt:
            path, name = _path(place, document)
            sentence = " or ".join([_sentence(same[0], json_schema), *(_allowed(one, json_schema) for one in same[1:])])
            sentences.setdefault(path + sentence, []).append(name)
    return [
        sentence.replace(MODEL, names[0] if len(names) == 1 else f"{{{', '.join(names)}}}")
        for sentence, names in sentences.items()
    ]


def describe_truth_values(document: Any, schema: type[BaseModel]) -> list[str]:
    """Return a sentence for each true or false in place of a number; pydantic takes them for 1 and 0."""
    json_schema = schema.model_json_schema()
    sentences = []
    for place, value in _truth_values(document, ()):
        types = {one.get("type") for one in _members(json_schema, place)}
        if types & {"number", "integer"} and "boolean" not in types:
            path, name = _path(place, document)
            hint = "" if value else " (YAML reads off and no as false)"
            sentences.append(f"{path.replace(MODEL, name)} is {shown(value)}: it must be a number{hint}")
    return sentences


def _truth_values(node: Any, place: Place) -> Iterator[tuple[Place, bool]]:
    """Yield the place and value of each true and false."""
    if isinstance(node, bool):
        yield place, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _truth_values(value, (*place, key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _truth_values(value, (*place, number))


def _follows(error: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a list is too short only because one of its entries is invalid."""
    place, size = error["loc"], len(error["loc"])
    return error["type"] == "too_short" and any(one["loc"][:size] == place != one["loc"] for one in errors)


def _by_value(
    errors: Sequence[Mapping[str, Any]], json_schema: Mapping[str, Any]
) -> Mapping[Place, Sequence[Mapping[str, Any]]]:
    """Group errors by the place of their value: pydantic reports one for each allowed type."""
    groups: dict[Place, list[Mapping[str, Any]]] = {}
    for error in errors:
        place = error["loc"]
        is_choice = len(_members(json_schema, place[:-1])) > 1
        groups.setdefault(place[:-1] if is_choice else place, []).append(error)
    return groups


def _allowed(error: Mapping[str, Any], json_schema: Mapping[str, Any]) -> str:
    """Return the allowed values of another type."""
    return _sentence(error, json_schema).rpartition(": it must be ")[2]


def _sentence(error: Mapping[str, Any], json_schema: Mapping[str, Any]) -> str:
    """Return the sentence after the path."""
    if error["type"] in UNKNOWN:
        meant = _nearest_key(error, json_schema)
        hint = f"did you mean {meant}?" if meant else f"known: {', '.join(_keys(json_schema, error['loc'][:-1]))}"
        return f" is no key here: {hint}"
    if error["type"] in MISSING:
        return " is missing"
    if error["type"] == "value_error":
        return f": {error['ctx']['error']}"
    allowed = formatted(error, CONFIG_SENTENCES)
    quoted = ' (YAML reads off as false: write "off")' if error["input"] is False and OFF.search(allowed) else ""
    return f" is {shown(error['input'])}: {allowed}{quoted}"


def _nearest_key(error: Mapping[str, Any], json_schema: Mapping[str, Any]) -> str:
    """Return the known key that is nearest to an unknown one; empty if none is near."""
    return nearest_name(str(error["loc"][-1]), _keys(json_schema, error["loc"][:-1]))


def _keys(json_schema: Mapping[str, Any], place: Place) -> tuple[str, ...]:
    """Return the keys that a JSON schema allows at ``place``."""
    return tuple(_resolved(json_schema, _members(json_schema, place)[0]).get("properties", ()))


def _members(json_schema: Mapping[str, Any], place: Place) -> list[Mapping[str, Any]]:
    """Return the schemas that a value at ``place`` may have, without null."""
    node = json_schema
    for part in place:
        node = _resolved(json_schema, node)
        named = node.get("properties", {}).get(part) or node.get("additionalProperties")
        node = node.get("items", {}) if isinstance(part, int) else named if isinstance(named, dict) else {}
    return [one for one in node.get("anyOf", (node,)) if one.get("type") != "null"]


def _resolved(json_schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    node = next((one for one in node.get("anyOf", ()) if one.get("type") != "null"), node)
    found: Mapping[str, Any] = json_schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return found


def _path(place: Place, document: Any) -> tuple[str, str]:
    """Return the path of a mistake, such as ``models.MODEL.denoiser.num_rank``, and the model's name."""
    place, name = (place[len(ROOT) :], "") if place[: len(ROOT)] == ROOT else (place, "")
    if len(place) > 1 and place[0] == "models":
        try:
            name = str(document["applications"][0]["args"]["models"][place[1]]["name"])
        except (KeyError, IndexError, TypeError):
            name = str(place[1])
        place = ("models", MODEL, *place[2:])
    return ".".join(map(str, place)) or "the configuration", name
