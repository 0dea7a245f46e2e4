"""Types of the fields of requests, with error messages and JSON schemas of their own. ``bodies`` are made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from PIL import ImageColor
from pydantic import AfterValidator, PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.requests.untrusted import json_value
from pipelines.lora.source import MAX_SCALE, check_scale
from pipelines.size import PIXELS

MAX_SEED = 2**53 - 1
"""Largest seed: every JSON reader keeps it exact, so the seed of an answer can be sent again."""
MAX_PROMPT_CHARS = 32_000
MAX_COUNT = 10**15 - 1
RANDOM_SEED = -1
SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
NUL = "\x00"
BLANK = "it must hold more than spaces"


def _without_nul(text: str) -> str:
    """Refuse NUL, which PostgreSQL cannot store."""
    if NUL in text:
        raise PydanticCustomError("nul", "it must not hold the character U+0000")
    return text


def _says_something(text: str) -> str:
    if not text or text.isspace():
        raise PydanticCustomError("blank", BLANK)
    return text


def _countable(number: int) -> int:
    """Limit the digits of a number, so that it does not fill messages and logs. The model decides what is allowed."""
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
    """Return the bytes of a file, or the URL that holds them, unchecked."""
    if isinstance(written, Mapping) and set(written) == {"image_url"}:
        written = written["image_url"]
    if isinstance(written, bytes | str):
        return written
    raise PydanticCustomError("picture", 'it must be a picture: a file, a data URL, or {"image_url": a data URL}')


def _video(written: object) -> bytes | str:
    """Return the bytes of a file, their data URL, or the id of a file or clip, unchecked."""
    is_id = False
    if isinstance(written, Mapping) and len(written) == 1 and next(iter(written)) in VIDEO_KEYS:
        ((key, written),) = written.items()
        is_id = key != "video_url"
    if isinstance(written, bytes | str) and (not is_id or str(written).startswith(ID_STARTS)):
        return written
    raise PydanticCustomError("video", VIDEO_SENTENCE)


def _videos(written: object) -> tuple[bytes | str, ...]:
    return tuple(map(_video, written if isinstance(written, list | tuple) else (written,)))


def _video_mask(written: object) -> bytes | str:
    """Return the same as ``_video``, or a picture."""
    if isinstance(written, Mapping) and set(written) == {"image_url"}:
        return _picture(written)
    try:
        return _video(written)
    except PydanticCustomError:
        raise PydanticCustomError("video_mask", VIDEO_MASK_SENTENCE) from None


def _pictures(written: object) -> tuple[bytes | str, ...]:
    return tuple(map(_picture, written if isinstance(written, list | tuple) else (written,)))


AskedLora: TypeAlias = tuple[str, float | None]
"""An adapter as a client names it, and how much of it; None: the model's own scale."""


def from_text(written: object) -> object:
    """Return the value, which in a form is the text of its JSON; text that is no JSON unchanged."""
    if isinstance(written, str):
        with suppress(ValueError):
            return json_value(written)
    return written


def _loras(written: object) -> tuple[AskedLora, ...]:
    written = from_text(written)
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
    return name, None if scale is None else float(scale)  # 1 and 1.0 are written alike into a picture's file


def _steps(written: object) -> tuple[float, ...]:
    written = from_text(written)
    if not isinstance(written, list | tuple) or not 0 < len(written) <= MAX_SOLVER_STEPS:
        raise PydanticCustomError("steps", STEPS_SENTENCE)
    if not all(map(_is_number, written)):
        raise PydanticCustomError("steps", STEPS_SENTENCE)
    return tuple(map(float, written))


def _frame_indices(written: object) -> tuple[int, ...]:
    written = from_text(written)
    if not isinstance(written, list | tuple) or not 0 < len(written) <= MAX_FRAME_INDICES:
        raise PydanticCustomError("frame_indices", FRAMES_SENTENCE)
    if not all(isinstance(one, int) and _is_number(one) for one in written):
        raise PydanticCustomError("frame_indices", FRAMES_SENTENCE)
    return tuple(written)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_COUNT


VIDEO_KEYS = ("video_url", "file_id", "id")
ID_STARTS = ("file-", "video_")
"""Beginnings of the ids of files and clips."""
VIDEO_SENTENCE = (
    'it must be one clip: a file, a data URL, {"video_url": a data URL}, {"file_id": that of a file of /v1/files}, or '
    '{"id": that of a clip of /v1/videos}'
)
VIDEO_MASK_SENTENCE = (
    'it must be one picture or clip: a file, a data URL, {"image_url": a data URL}, {"video_url": a data URL}, '
    '{"file_id": that of a file of /v1/files}, or {"id": that of a clip of /v1/videos}'
)
MAX_SOLVER_STEPS = 1000
MAX_FRAME_INDICES = 64
FRAMES_SENTENCE = "it must be a list of 1 to 64 whole numbers, one for each picture, such as [0, 40, -1]"
STEPS_SENTENCE = "it must be a list of 1 to 1000 numbers, such as [1.0, 0.75, 0.5, 0.25]"
LORA_SENTENCE = 'it must be a list such as [{"name": "watercolour", "scale": 0.8}]; scale may be left out'


RESULT_BACKGROUNDS = ("opaque", "auto", "transparent")
"""OpenAI's values, which are about the result."""
BACKGROUNDS = (*RESULT_BACKGROUNDS, *sorted(ImageColor.colormap))
HEX_COLOUR = "#[0-9a-fA-F]{6}"


def _background(written: str) -> str:
    if written not in BACKGROUNDS and re.fullmatch(HEX_COLOUR, written) is None:
        raise PydanticCustomError(
            "background", "it must be opaque, auto, or the colour beneath transparent input pictures: navy, #ff8800"
        )
    return written


Background = Annotated[
    str,
    AfterValidator(_background),
    WithJsonSchema({"type": "string", "anyOf": [{"enum": list(BACKGROUNDS)}, {"pattern": f"^{HEX_COLOUR}$"}]}),
]


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Marks a field that is accepted and changes nothing of what is made."""

    example: object
    """Example of a client's value."""


WITHOUT_NUL = AfterValidator(_without_nul)
"""Comes after a limit of the length: pydantic counts "items after validation" otherwise."""
Prompt = Annotated[
    str,
    StringConstraints(max_length=MAX_PROMPT_CHARS),
    WITHOUT_NUL,
    AfterValidator(_says_something),
    WithJsonSchema({"type": "string", "maxLength": MAX_PROMPT_CHARS, "minLength": 1}),
]
OptionalPrompt = Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS), WITHOUT_NUL]
"""A prompt that may be empty. A check with the model decides whether it must hold more than spaces."""
Name = Annotated[str, StringConstraints(max_length=512), WITHOUT_NUL]
Size = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^({PIXELS}|auto)?$"})]
"""Checked together with the model, whose own sizes make better examples."""
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
VIDEO_SCHEMA = {
    "anyOf": [
        {"type": "string", "description": "Base64 in a data URL (RFC 2397), or the id of a file or a clip."},
        *(
            {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
                "additionalProperties": False,
            }
            for key in VIDEO_KEYS
        ),
    ]
}
Video = Annotated[bytes | str, PlainValidator(_video), WithJsonSchema(VIDEO_SCHEMA)]
"""A clip as it was written."""
VIDEOS_SCHEMA = {"anyOf": [*VIDEO_SCHEMA["anyOf"], {"type": "array", "items": VIDEO_SCHEMA}]}
Videos = Annotated[tuple[bytes | str, ...], PlainValidator(_videos), WithJsonSchema(VIDEOS_SCHEMA)]
"""One clip, or several in their order."""
VIDEO_MASK_SCHEMA = {"anyOf": [VIDEO_SCHEMA, PICTURE_SCHEMA]}
VideoMask = Annotated[bytes | str, PlainValidator(_video_mask), WithJsonSchema(VIDEO_MASK_SCHEMA)]
"""A mask of a clip."""
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
"""Adapters by name. A later check compares them with the model's."""
Steps = Annotated[
    tuple[float, ...],
    PlainValidator(_steps),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": MAX_SOLVER_STEPS}),
]
"""Looked at together with the model."""
Quality = Literal["low", "medium", "high"]
FrameIndices = Annotated[
    tuple[int, ...],
    PlainValidator(_frame_indices),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": MAX_FRAME_INDICES}),
]
"""The same."""
WrittenQuality = Literal["auto", "low", "medium", "high", "standard", "hd"]
