"""What clients may send, field by field. Rules that depend on the model are in ``rules``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.clips.storage import Variant
from deployments.requests.fields import (
    MAX_SEED,
    RANDOM_SEED,
    Count,
    Loras,
    Name,
    NegativePrompt,
    NoEffect,
    Off,
    OptionalPrompt,
    Picture,
    Pictures,
    Prompt,
    Seconds,
    Size,
    Strength,
)
from deployments.requests.quality import WrittenQuality
from pipelines.caching import CacheMode

ACCEPTED = "Accepted, without effect."
STRENGTH = "How much of the picture is painted anew, up to 1; for models that take it."
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
    enhance_prompt: Off | None = Field(None, description=SWITCH)
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
        description="A name or alias from /v1/models, and NAME:ADAPTER with an adapter of it; by default the first of "
        "its kind that takes the pictures.",
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
    background: Annotated[Literal["opaque", "auto"], NoEffect("auto")] | None = Field(
        None, description="Always opaque."
    )
    moderation: Annotated[Literal["low", "auto"], NoEffect("low")] | None = Field(
        None, description="Accepted; there is no moderation."
    )
    user: Annotated[Name, NoEffect("somebody")] | None = Field(
        None, description="Given back as safety_identifier, with pictures."
    )


class ImageBody(MediaBody):
    """POST /v1/images/generations"""

    n: Count | None = Field(None, description="Pictures, with seeds seed, seed + 1, …")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp, 100 is best.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    partial_images: int | None = Field(None, ge=0, le=3, description="Previews on the way; needs stream.")
    stream_progress: bool | None = Field(None, description="Add a troupe.progress event per step; needs stream.")
    safety_identifier: Annotated[Name, NoEffect("somebody")] | None = None


class EditBody(ImageBody):
    """POST /v1/images/edits"""

    picture_fields = ("image", "images", "mask")

    prompt: OptionalPrompt = Field(
        "", description="What to make of the pictures, in words; may be empty where the model describes them itself."
    )
    image: Pictures | None = Field(None, description="The pictures to change: PNG, JPEG or WebP, one or several.")
    images: Pictures | None = Field(None, description="The same as image, by its name in JSON.")
    mask: Picture | None = Field(
        None, description="Where to paint, as large as the first picture: what is transparent in it, or else white."
    )
    strength: Strength | None = Field(None, description=STRENGTH)
    layers: Count | None = Field(
        None, description="How many transparent pictures the picture is taken apart into, by models that do that."
    )
    input_fidelity: Annotated[Literal["high", "low"], NoEffect("high")] | None = Field(None, description=ACCEPTED)


class VideoBody(MediaBody):
    """POST /v1/videos"""

    picture_fields = ("input_reference",)

    input_reference: Pictures | None = Field(None, description="The picture to begin with: PNG, JPEG or WebP.")
    strength: Strength | None = Field(None, description=STRENGTH)
    seconds: Seconds | None = Field(None, description="Length of the clip; the nearest that the model can make.")
    num_frames: Count | None = Field(None, description="Length in frames, instead of seconds.")
    fps: int | None = Field(None, ge=1, le=120, description="Frames a second.")
    generate_sound: bool | None = Field(
        None,
        description="Whether the clip has a sound; by default as its model does, whose make_sound says it.",
    )
    n: Annotated[Count, NoEffect(1)] | None = Field(None, description="Only 1: a request makes one clip.")
    num_outputs_per_prompt: Annotated[Count, NoEffect(1)] | None = Field(None, description="The same as n.")


class PageQuery(BaseModel):
    """GET /v1/videos"""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, description="The last id of the page before.")
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = Field("desc", description="By creation.")


class ContentQuery(BaseModel):
    """GET /v1/videos/{video_id}/content"""

    model_config = ConfigDict(extra="forbid")

    variant: Variant = Field("video", description="preview: the last one of a clip that is being made.")
