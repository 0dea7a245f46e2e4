"""Bodies of requests: types of fields with their own error messages, and the bodies made of them.

Rules that depend on the model are in ``rules``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from PIL import ImageColor
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, from_json

from deployments.clips.storage import Variant
from deployments.requests.pictures.sources import Sources
from pipelines.caching import CacheMode
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
    """Return the bytes of a file, the URL that holds them, or the id of a file or a clip, unchecked."""
    if isinstance(written, Mapping) and len(written) == 1 and next(iter(written)) in VIDEO_KEYS:
        (written,) = written.values()
    if isinstance(written, bytes | str):
        return written
    raise PydanticCustomError("video", VIDEO_SENTENCE)


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


def _steps(written: object) -> tuple[float, ...]:
    """In a form it is the text of its JSON."""
    if isinstance(written, str):
        with suppress(ValueError):
            written = from_json(written, allow_inf_nan=False)
    if not isinstance(written, list | tuple) or not 0 < len(written) <= MAX_SOLVER_STEPS:
        raise PydanticCustomError("steps", STEPS_SENTENCE)
    if not all(map(_is_number, written)):
        raise PydanticCustomError("steps", STEPS_SENTENCE)
    return tuple(map(float, written))


def _frame_indices(written: object) -> tuple[int, ...]:
    """In a form it is the text of its JSON."""
    if isinstance(written, str):
        with suppress(ValueError):
            written = from_json(written, allow_inf_nan=False)
    if not isinstance(written, list | tuple) or not 0 < len(written) <= MAX_FRAME_INDICES:
        raise PydanticCustomError("frame_indices", FRAMES_SENTENCE)
    if not all(isinstance(one, int) and _is_number(one) for one in written):
        raise PydanticCustomError("frame_indices", FRAMES_SENTENCE)
    return tuple(written)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_COUNT


VIDEO_KEYS = ("video_url", "file_id", "id")
VIDEO_SENTENCE = (
    'it must be one clip: a file, a data URL, {"video_url": a data URL}, {"file_id": that of a file of /v1/files}, or '
    '{"id": that of a clip of /v1/videos}'
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
    WithJsonSchema({"type": "string", "anyOf": [{"enum": BACKGROUNDS}, {"pattern": f"^{HEX_COLOUR}$"}]}),
]


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
"""Whether the model has them is looked at together with the model."""
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
ACCEPTED = "Accepted, without effect."
STRENGTH = "How much of the picture or clip is painted anew, up to 1; for models that take it."
SWITCH = "Another server's switch: accepted while it is off."


class PeerFields(BaseModel):
    """Fields of other servers whose clients send them always. What would change the picture is refused."""

    generator_device: Annotated[Name, NoEffect("cuda")] | None = Field(
        None, description="Accepted: noise is drawn on the CPU, the same everywhere."
    )
    bot_task: Annotated[Name, NoEffect("think")] | None = Field(
        None, description="Accepted: how another server's model would rewrite the prompt."
    )
    extra_body: dict[str, object] | str | None = Field(
        None, description="Further fields, which count as if they stood beside it. In a form: the text of the JSON."
    )
    enable_teacache: Off | None = Field(None, description=SWITCH)
    enable_upscaling: Off | None = Field(None, description=SWITCH)
    enable_frame_interpolation: Off | None = Field(None, description=SWITCH)
    generate_sound: Off | None = Field(None, description=SWITCH)
    profile: Off | None = Field(None, description=SWITCH)
    profile_all_stages: Off | None = Field(None, description=SWITCH)
    return_stage_metrics: Off | None = Field(None, description=SWITCH)
    vae_use_slicing: Off | None = Field(None, description=SWITCH)
    vae_use_tiling: Off | None = Field(None, description=SWITCH)


class MediaBody(PeerFields):
    """Fields that pictures and clips share. A field that is null or absent takes the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    picture_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that hold pictures, which are files in a form."""

    prompt: Prompt = Field(description="What to draw, in words.", examples=["a small red circle, white background"])
    model: Name | None = Field(
        None,
        description="A name or alias from /v1/models, and NAME:ADAPTER with an adapter or a recipe of it; by default "
        "the first of its kind that takes the pictures.",
    )
    recipe: Name | None = Field(
        None, description="Defaults by their name in /v1/models; what the request says itself wins."
    )
    enhance_prompt: bool | None = Field(
        None,
        description="Whether a language model rewrites the prompt first; by default what the model's card says.",
    )
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto.", examples=["128x128"])
    width: Count | None = Field(None, description="Pixels, with height; instead of size.")
    height: Count | None = Field(None, description="Pixels, with width; instead of size.")
    negative_prompt: NegativePrompt | None = Field(
        None, description="What to avoid; needs classifier-free guidance: true_cfg_scale above 1."
    )
    seed: int | None = Field(
        None, ge=RANDOM_SEED, le=MAX_SEED, description="The same seed gives the same bytes; -1 takes a random one."
    )
    num_inference_steps: Count | None = Field(None, description="Solver steps; wins over quality.")
    quality: WrittenQuality | None = Field(
        None, description="Steps in words: low is half the model's default, high (hd) one and a half times."
    )
    guidance_scale: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="The guidance that the model has: distilled (FLUX.1-dev), or else classifier-free (Wan).",
    )
    true_cfg_scale: float | None = Field(
        None, ge=1, le=1000, description="Classifier-free guidance; 1 turns it off. Also guidance_scale, where unique."
    )
    guidance_scale_2: float | None = Field(
        None, ge=0, le=1000, description="true_cfg_scale of the second transformer (Wan 2.2); by default the same."
    )
    boundary_ratio: float | None = Field(
        None, ge=0, le=1, description="Share of the noise levels that the second transformer takes (Wan 2.2)."
    )
    scheduler: Name | None = Field(None, description="Solver, among those in /v1/models.", examples=["euler"])
    flow_shift: float | None = Field(
        None, description="Constant shift of the schedule, in place of the model's own.", examples=[3.0]
    )
    sigmas: Steps | None = Field(
        None, description="Noise level of each step before the shift, falling. In a form: the text of the JSON."
    )
    timesteps: Steps | None = Field(
        None, description="Timestep of each step, falling, instead of sigmas, for models that take them."
    )
    lora: Loras | None = Field(
        None,
        description="Adapters by their names in /v1/models, and how much of each. In a form: the text of the JSON.",
        examples=[[{"name": "watercolour", "scale": 0.8}]],
    )
    cache: CacheMode | None = Field(
        None, description="Steps that take the predictions of the step before them: some, half of them, or none (off)."
    )
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        None, description="How urgent it is beside others: flex waits longer, priority less. auto is default."
    )
    deadline_s: float | None = Field(
        None,
        ge=0.001,
        le=10**6,
        description="Seconds within which it must be done: refused with 429 at once if it will not be.",
    )
    style: Annotated[Literal["vivid", "natural"], NoEffect("vivid")] | None = Field(None, description=ACCEPTED)
    background: Background | None = Field(
        None,
        description="A colour (navy, #ff8800) beneath transparent parts of input pictures, instead of white. "
        "opaque, auto and transparent are about the result, which is opaque but for layers.",
    )
    moderation: Annotated[Literal["low", "auto"], NoEffect("low")] | None = Field(
        None, description="Accepted; there is no moderation."
    )
    user: Annotated[Name, NoEffect("somebody")] | None = Field(
        None, description="Given back as safety_identifier, with pictures."
    )

    @property
    def ground(self) -> str | None:
        """The colour beneath transparent input pictures; None: white, or none in layers."""
        return None if self.background in (None, *RESULT_BACKGROUNDS) else self.background

    @property
    def sources(self) -> Sources:
        """The encoded pictures of the body, in their order."""
        return Sources(param="model")


class ImageBody(MediaBody):
    """Body of POST /v1/images/generations."""

    n: Count | None = Field(None, description="Pictures, with seeds seed, seed + 1, …")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp, 100 is best.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    partial_images: int | None = Field(None, ge=0, le=3, description="Previews on the way; needs stream.")
    stream_progress: bool | None = Field(None, description="Add a troupe.progress event per step; needs stream.")
    safety_identifier: Annotated[Name, NoEffect("somebody")] | None = None


class EditBody(ImageBody):
    """Body of POST /v1/images/edits."""

    picture_fields = ("image", "images", "mask", "control_image")

    prompt: OptionalPrompt = Field(
        "", description="What to make of the pictures, in words; may be empty where the model describes them itself."
    )
    image: Pictures | None = Field(None, description="The pictures to change: PNG, JPEG or WebP, one or several.")
    images: Pictures | None = Field(None, description="The same as image, by its name in JSON.")
    mask: Picture | None = Field(
        None, description="Where to paint, as large as the first picture: what is transparent in it, or else white."
    )
    control_image: Picture | None = Field(
        None, description="What the result follows, for models that take it: edges, depths, a pose."
    )
    control_scale: float | None = Field(None, ge=0, le=10, description="Weight of the control picture.")
    control_guidance_start: float | None = Field(
        None, ge=0, le=1, description="Share of the steps before the control picture counts."
    )
    control_guidance_end: float | None = Field(
        None, ge=0, le=1, description="Share of the steps after which the control picture no longer counts."
    )
    strength: Strength | None = Field(None, description=STRENGTH)
    layers: Count | None = Field(
        None, description="How many transparent pictures the picture is taken apart into, by models that do that."
    )
    input_fidelity: Annotated[Literal["high", "low"], NoEffect("high")] | None = Field(None, description=ACCEPTED)

    @property
    def sources(self) -> Sources:
        """See ``MediaBody.sources``."""
        pictures = (self.image or ()) + (self.images or ())
        return Sources(param="image", pictures=pictures, mask=self.mask, control=self.control_image)


def _webhook(written: object) -> object:
    """In a form it is the text of its JSON."""
    if isinstance(written, str):
        with suppress(ValueError):
            written = from_json(written, allow_inf_nan=False)
    if not isinstance(written, Mapping) or set(written) != {"url", "secret"}:
        raise PydanticCustomError("webhook", 'it must be {"url": "https://…", "secret": "whsec_…"}')
    return written


class WebhookBody(BaseModel):
    """Receiver of the message about the end of a clip."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[Text, StringConstraints(max_length=2048)] = Field(description="At a host that the server allows.")
    secret: Annotated[Text, StringConstraints(max_length=128)] = Field(
        description="whsec_ and the base64 of 24 to 64 random bytes, by which messages are signed."
    )


class VideoBody(MediaBody):
    """Body of POST /v1/videos."""

    picture_fields = ("input_reference", "video")

    input_reference: Pictures | None = Field(
        None, description="The picture to begin with, or several at frames: PNG, JPEG or WebP."
    )
    frame_indices: FrameIndices | None = Field(
        None,
        description="The frame of each picture, counted from 0, or from the end with -1; for models that take it. In a "
        "form: the text of the JSON.",
    )
    video: Video | None = Field(
        None, description="The clip to change or to go on from: MP4, MOV, WebM or GIF, or the id of a file or a clip."
    )
    strength: Strength | None = Field(None, description=STRENGTH)
    seconds: Seconds | None = Field(None, description="Length of the clip; the nearest that the model can make.")
    num_frames: Count | None = Field(None, description="Length in frames, instead of seconds.")
    fps: int | None = Field(None, ge=1, le=120, description="Frames a second.")
    generate_sound: bool | None = Field(
        None,
        description="Whether the clip has a sound; by default as its model does, whose make_sound says it.",
    )
    webhook: Annotated[WebhookBody, BeforeValidator(_webhook)] | None = Field(
        None,
        description="Who hears of its end by a signed request (Standard Webhooks). In a form: the text of the JSON.",
    )
    n: Annotated[Count, NoEffect(1)] | None = Field(None, description="Only 1: a request makes one clip.")
    num_outputs_per_prompt: Annotated[Count, NoEffect(1)] | None = Field(None, description="The same as n.")

    @property
    def sources(self) -> Sources:
        """See ``MediaBody.sources``."""
        return Sources(param="input_reference", pictures=self.input_reference or (), video=self.video)


class PageQuery(BaseModel):
    """Query of GET /v1/videos."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, description="The last id of the page before.")
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = Field("desc", description="By creation.")


class ContentQuery(BaseModel):
    """Query of GET /v1/videos/{video_id}/content."""

    model_config = ConfigDict(extra="forbid")

    variant: Variant = Field("video", description="preview: the last one of a clip that is being made.")
