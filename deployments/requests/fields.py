"""Types of the fields that clients send, each with its own sentence for what is wrong. The model is not known here."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipelines.size import PIXELS

MAX_SEED = 2**53 - 1
"""Largest seed: every JSON reader keeps integers up to here exact, so the seed in an answer can be sent again."""
MAX_PROMPT_CHARS = 32_000
MAX_COUNT = 10**15 - 1
RANDOM_SEED = -1
SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
NUL = "\x00"


def _without_nul(text: str) -> str:
    """NUL is refused because PostgreSQL cannot store it."""
    if NUL in text:
        raise PydanticCustomError("nul", "it must not hold the character U+0000")
    return text


def _says_something(text: str) -> str:
    if not text or text.isspace():
        raise PydanticCustomError("blank", "it must say something: spaces alone tell the model nothing")
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


Text = Annotated[str, AfterValidator(_without_nul)]
Prompt = Annotated[
    str,
    StringConstraints(max_length=MAX_PROMPT_CHARS),
    AfterValidator(_without_nul),
    AfterValidator(_says_something),
    WithJsonSchema({"type": "string", "maxLength": MAX_PROMPT_CHARS, "minLength": 1}),
]
NegativePrompt = Annotated[Text, StringConstraints(max_length=MAX_PROMPT_CHARS)]
Name = Annotated[Text, StringConstraints(max_length=512)]
Size = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^({PIXELS}|auto)?$"})]
"""What is written is looked at together with the model, whose own sizes make better examples."""
Count = Annotated[int, AfterValidator(_countable), WithJsonSchema({"type": "integer", "minimum": 1})]
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})]
Seconds = Annotated[
    float,
    PlainValidator(_seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": f"^{SECONDS.pattern}$"}, {"type": "number", "exclusiveMinimum": 0}]}
    ),
]
