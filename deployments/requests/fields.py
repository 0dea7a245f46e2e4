"""Types of the fields that clients send, each with its own sentence for what is wrong. The model is not known here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json

from pipelines.lora.source import MAX_SCALE, check_scale
from pipelines.size import PIXELS

MAX_SEED = 2**53 - 1
"""Largest seed: every JSON reader keeps integers up to here exact, so the seed in an answer can be sent again."""
MAX_PROMPT_CHARS = 32_000
MAX_COUNT = 10**15 - 1
RANDOM_SEED = -1
SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
NUL = "\x00"
BLANK = "it must say something: spaces alone tell the model nothing"


def _without_nul(text: str) -> str:
    """NUL is refused because PostgreSQL cannot store it."""
    if NUL in text:
        raise PydanticCustomError("nul", "it must not hold the character U+0000")
    return text


def _says_something(text: str) -> str:
    if not text or text.isspace():
        raise PydanticCustomError("blank", BLANK)
    return text


def _countable(number: int) -> int:
    """What is allowed depends on the model; here it is only kept from filling messages and logs."""
    if abs(number) > MAX_COUNT:
        raise PydanticCustomError("long_number", "it must be a whole number of at most 15 digits")
    return number


def _off(switch: bool) -> bool:
    if switch:
        raise PydanticCustomError("not_supported", "this is not supported here; leave it out, or send false")
    return switch


def _seconds(written: object) -> float:
    if isinstance(written, str) and SECONDS.fullmatch(written):
        return float(written)
    if isinstance(written, int | float) and not isinstance(written, bool) and abs(written) <= MAX_COUNT:
        return float(written)
    raise PydanticCustomError("seconds", 'it must be a length in seconds, such as 2 or "2.5"')


def _picture(written: object) -> bytes | str:
    """Returns the bytes of a file, or the URL that holds them; what is in them is looked at later."""
    if isinstance(written, Mapping) and set(written) == {"image_url"}:
        written = written["image_url"]
    if isinstance(written, bytes | str):
        return written
    raise PydanticCustomError("picture", 'it must be a picture: a file, a data URL, or {"image_url": a data URL}')


def _pictures(written: object) -> tuple[bytes | str, ...]:
    return tuple(map(_picture, written if isinstance(written, list | tuple) else (written,)))


AskedLora: TypeAlias = tuple[str, float | None]
"""An adapter as a client names it, and how much of it; None: the model's own scale."""


def _loras(written: object) -> tuple[AskedLora, ...]:
    """In a form it is the text of its JSON."""
    if isinstance(written, str):
        try:
            written = from_json(written, allow_inf_nan=False)
        except ValueError:
            raise PydanticCustomError("loras", LORA_SENTENCE) from None
    if not isinstance(written, list | tuple):
        raise PydanticCustomError("loras", LORA_SENTENCE)
    return tuple(map(_lora, written))


def _lora(written: object) -> AskedLora:
    if not isinstance(written, Mapping) or not {"name"} <= set(written) <= {"name", "scale"}:
        raise PydanticCustomError("loras", LORA_SENTENCE)
    name, scale = written["name"], written.get("scale")
    if not isinstance(name, str) or isinstance(scale, bool) or not isinstance(scale, int | float | None):
        raise PydanticCustomError("loras", LORA_SENTENCE)
    if scale is not None:
        try:
            check_scale(max(-MAX_COUNT, min(MAX_COUNT, scale)))  # of many more digits no float is made
        except ValueError as error:
            raise PydanticCustomError("lora_scale", str(error)) from None
    return name, scale


LORA_SENTENCE = 'it must be a list such as [{"name": "watercolour", "scale": 0.8}]; scale may be left out'


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Marks a field that is accepted and changes nothing of what is made; ``example`` is what clients send."""

    example: object


Text = Annotated[str, AfterValidator(_without_nul)]
Prompt = Annotated[
    str,
    StringConstraints(max_length=MAX_PROMPT_CHARS),
    AfterValidator(_without_nul),
    AfterValidator(_says_something),
    WithJsonSchema({"type": "string", "maxLength": MAX_PROMPT_CHARS, "minLength": 1}),
]
OptionalPrompt = Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS), AfterValidator(_without_nul)]
"""Whether it must say something is looked at together with the model."""
NegativePrompt = Annotated[Text, StringConstraints(max_length=MAX_PROMPT_CHARS)]
Name = Annotated[Text, StringConstraints(max_length=512)]
Size = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^({PIXELS}|auto)?$"})]
"""What is written is looked at together with the model, whose own sizes make better examples."""
Count = Annotated[int, AfterValidator(_countable), WithJsonSchema({"type": "integer", "minimum": 1})]
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False}), NoEffect(False)]
Seconds = Annotated[
    float,
    PlainValidator(_seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": f"^{SECONDS.pattern}$"}, {"type": "number", "exclusiveMinimum": 0}]}
    ),
]
DATA_URL_SCHEMA = {"type": "string", "pattern": "^data:", "description": "Base64 in a data URL (RFC 2397)."}
OBJECT_SCHEMA = {
    "type": "object",
    "properties": {"image_url": DATA_URL_SCHEMA},
    "required": ["image_url"],
    "additionalProperties": False,
}
PICTURE_SCHEMA = {"anyOf": [DATA_URL_SCHEMA, OBJECT_SCHEMA]}
PICTURES_SCHEMA = {"anyOf": [DATA_URL_SCHEMA, OBJECT_SCHEMA, {"type": "array", "items": PICTURE_SCHEMA}]}
Picture = Annotated[bytes | str, PlainValidator(_picture), WithJsonSchema(PICTURE_SCHEMA)]
"""One picture as it was written."""
Pictures = Annotated[tuple[bytes | str, ...], PlainValidator(_pictures), WithJsonSchema(PICTURES_SCHEMA)]
"""One picture, or several in their order."""
Strength = Annotated[float, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 1})]
"""Looked at together with the model."""
LORA_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "scale": {"anyOf": [{"type": "number", "minimum": -MAX_SCALE, "maximum": MAX_SCALE}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
Loras = Annotated[
    tuple[AskedLora, ...], PlainValidator(_loras), WithJsonSchema({"type": "array", "items": LORA_SCHEMA})
]
"""Which there are is looked at together with the model."""
