"""What is wrong with a configuration: one sentence a mistake, with the key that was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from deployments.requests.errors import SENTENCES, shown
from deployments.spelling import nearest_name

Place = tuple[str | int, ...]

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
OWN_SENTENCES = SENTENCES | {
    "too_short": "it must have at least {min_length} entry",
    "too_long": "it must have at most {max_length} entry",
    "greater_than": "it must be above {gt}",
    "tuple_type": "it must be a list",
    "dict_type": "it must be a section of keys and values",
    "model_type": "it must be a section of keys and values",
    "dataclass_type": "it must be a section of keys and values",
}
ROOT: Place = ("applications", 0, "args")
"""Where nearly all of a configuration lies; not told."""
MODELS: Place = (*ROOT, "models")


def mistakes(error: ValidationError, document: Any, schema: Any) -> list[str]:
    """Returns a sentence for each mistake in ``document``, which is no ``schema``.

    A mistake that was made in several models is told once, with their names; what only follows from another is not.
    """
    errors = [one for one in error.errors() if not _follows(one, error.errors())]
    misspelt = {_meant(one, schema) for one in errors if one["type"] in UNKNOWN}
    groups: dict[tuple[Place, str], list[Place]] = {}
    for place, same in _by_value(errors, schema).items():
        if same[0]["type"] not in MISSING or place not in misspelt:
            sentence = " or ".join([_sentence(same[0], schema), *(_allowed(one, schema) for one in same[1:])])
            groups.setdefault((_in_any_model(place), sentence), []).append(place)
    return [f"{_written(places, document)}{sentence}" for (_, sentence), places in groups.items()]


def _follows(error: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list counts as too short only since something inside it is wrong."""
    place = tuple(error["loc"])
    inner = (tuple(one["loc"]) for one in errors)
    return error["type"] == "too_short" and any(one[: len(place)] == place and len(one) > len(place) for one in inner)


def _by_value(errors: Sequence[Mapping[str, Any]], schema: Any) -> dict[Place, list[Mapping[str, Any]]]:
    """Returns the errors by where their values are: one that may be of several types has an error for each."""
    groups: dict[Place, list[Mapping[str, Any]]] = {}
    for error in errors:
        place = tuple(error["loc"])
        groups.setdefault(place[:-1] if _is_choice(_type_at(schema, place[:-1])) else place, []).append(error)
    return groups


def _allowed(error: Mapping[str, Any], schema: Any) -> str:
    """Returns what else a value might be."""
    return _sentence(error, schema).rpartition(": it must be ")[2]


def _is_choice(schema: Any) -> bool:
    """Whether a value may be of several types, null left out."""
    members = [one for one in get_args(schema) if one is not type(None)]
    return get_origin(schema) in (Union, UnionType) and len(members) > 1


def _meant(error: Mapping[str, Any], schema: Any) -> Place:
    """Returns where the key lies that an unknown one was probably meant to be; its name is empty if none is near."""
    *section, key = error["loc"]
    return (*section, nearest_name(str(key), _keys(schema, tuple(section))))


def _sentence(error: Mapping[str, Any], schema: Any) -> str:
    """Returns what follows the place."""
    if error["type"] in UNKNOWN:
        *section, meant = _meant(error, schema)
        known = ", ".join(_keys(schema, tuple(section)))
        return f" is no key here: {f'did you mean {meant}?' if meant else f'known: {known}'}"
    if error["type"] in MISSING:
        return " is missing"
    if error["type"] == "value_error":
        return f": {error['ctx']['error']}"
    facts = {name: str(fact).replace("'", "") for name, fact in error.get("ctx", {}).items()}
    sentence = OWN_SENTENCES.get(error["type"])
    return f" is {shown(error['input'])}: {sentence.format(**facts) if sentence else error['msg']}"


def _keys(schema: Any, place: Place) -> tuple[str, ...]:
    """Returns the keys that may stand at ``place`` of ``schema``."""
    return tuple(_fields(_section(_type_at(schema, place))))


def _type_at(schema: Any, place: Place) -> Any:
    """Returns the type at ``place`` of ``schema``, which is made of models, dataclasses and tuples; None beyond."""
    for part in place:
        if isinstance(part, int):
            schema = next((one for one in get_args(schema) if one is not ...), None)
        else:
            schema = _fields(_section(schema)).get(part)
    return schema


def _section(schema: Any) -> Any:
    """Returns the class of a section that may be left out."""
    if get_origin(schema) in (Union, UnionType):
        return next(one for one in get_args(schema) if one is not type(None))
    return schema


def _fields(section: Any) -> dict[str, Any]:
    """Returns the types of a section's keys; nothing for what is no section."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    if isinstance(section, type) and is_dataclass(section):
        types = get_type_hints(section)
        return {field.name: types[field.name] for field in fields(section)}
    return {}


def _in_any_model(place: Place) -> Place:
    depth = len(MODELS)
    return (*MODELS, "*", *place[depth + 1 :]) if place[:depth] == MODELS and len(place) > depth else place


def _written(places: Sequence[Place], document: Any) -> str:
    """Returns where it is: ``models.flux-dev.denoiser.num_rank``, or the names of several models in braces."""
    place, depth = _in_any_model(places[0]), len(MODELS)
    if place == places[0]:
        return ".".join(map(str, place[len(ROOT) :] if place[: len(ROOT)] == ROOT else place)) or "the configuration"
    names = [_name(document, one[depth]) for one in places]
    model = names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
    return ".".join(("models", model, *map(str, place[depth + 1 :])))


def _name(document: Any, index: str | int) -> str:
    try:
        return str(document["applications"][0]["args"]["models"][index]["name"])
    except (KeyError, IndexError, TypeError):
        return str(index)
