"""What is wrong with a configuration: one sentence a mistake, with the key that was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from deployments.requests.errors import SENTENCES, shown
from deployments.spelling import did_you_mean

Path = tuple[str | int, ...]

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
ROOT: Path = ("applications", 0, "args")
"""Where nearly all of a configuration lies; not told."""
MODELS: Path = (*ROOT, "models")


def mistakes(error: ValidationError, document: Any, schema: Any) -> list[str]:
    """Returns a sentence for each mistake in ``document``, which is no ``schema``.

    A mistake that was made in several models is told once, with their names; what only follows from another is not.
    """
    errors = [one for one in error.errors() if not _follows(one, error.errors())]
    sentences = [(tuple(one["loc"]), _sentence(one, document, schema)) for one in errors]
    misspelt = {(*path[:-1], key) for path, (_, key) in sentences if key}
    places: dict[tuple[Path, str], list[Path]] = {}
    for one, (path, (sentence, _)) in zip(errors, sentences, strict=True):
        if one["type"] not in MISSING or path not in misspelt:
            places.setdefault((_in_any_model(path), sentence), []).append(path)
    return [f"{_written(paths, document)}{sentence}" for (_, sentence), paths in places.items()]


def _follows(error: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list counts as too short only since something inside it is wrong."""
    path = tuple(error["loc"])
    inner = (tuple(one["loc"]) for one in errors)
    return error["type"] == "too_short" and any(one[: len(path)] == path and len(one) > len(path) for one in inner)


def _sentence(error: Mapping[str, Any], document: Any, schema: Any) -> tuple[str, str]:
    """Returns what follows the place, and the key that was meant if one was misspelt."""
    path = tuple(error["loc"])
    if error["type"] in UNKNOWN:
        known = _keys(schema, path[:-1])
        question = did_you_mean(str(path[-1]), known)
        hint = question or f"known: {', '.join(known)}"
        return f" is no key here: {hint}", question.removeprefix("did you mean ").rstrip("?")
    if error["type"] in MISSING:
        return " is missing", ""
    if error["type"] == "value_error":
        return f": {error['ctx']['error']}", ""
    facts = {name: str(fact).replace("'", "") for name, fact in error.get("ctx", {}).items()}
    sentence = OWN_SENTENCES.get(error["type"])
    return f" is {shown(error['input'])}: {sentence.format(**facts) if sentence else error['msg']}", ""


def _keys(schema: Any, path: Path) -> tuple[str, ...]:
    """Returns the keys that may stand at ``path`` of ``schema``, a type made of models, dataclasses and tuples."""
    for part in path:
        if isinstance(part, int):
            schema = next((one for one in get_args(schema) if one is not ...), None)
        else:
            schema = _fields(_section(schema)).get(part)
    return tuple(_fields(_section(schema)))


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


def _in_any_model(path: Path) -> Path:
    depth = len(MODELS)
    return (*MODELS, "*", *path[depth + 1 :]) if path[:depth] == MODELS and len(path) > depth else path


def _written(paths: Sequence[Path], document: Any) -> str:
    """Returns where it is: ``models.flux-dev.denoiser.num_rank``, or the names of several models in braces."""
    path, depth = _in_any_model(paths[0]), len(MODELS)
    if path == paths[0]:
        return ".".join(map(str, path[len(ROOT) :] if path[: len(ROOT)] == ROOT else path)) or "the configuration"
    names = [_name(document, one[depth]) for one in paths]
    model = names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
    return ".".join(("models", model, *map(str, path[depth + 1 :])))


def _name(document: Any, index: str | int) -> str:
    try:
        return str(document["applications"][0]["args"]["models"][index]["name"])
    except (KeyError, IndexError, TypeError):
        return str(index)
