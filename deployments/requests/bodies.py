"""What clients may send, field by field. Rules that depend on the model are in ``rules``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from deployments.clips.folders import Variant
from pipelines.size import PIXELS

MAX_SEED = 2**53 - 1
"""Largest seed: every JSON reader keeps integers up to here exact, so the seed in an answer can be sent again."""
MAX_PROMPT_CHARS = 32_000

# NUL is refused because PostgreSQL cannot store it; a prompt of spaces says nothing to a text encoder.
Prompt = Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
NegativePrompt = Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS, pattern=r"^[^\x00]*$")]
Size = Annotated[str, StringConstraints(pattern=f"^({PIXELS}|auto)$")]
Seconds = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}(\.[0-9]{1,3})?$")]
Name = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00]*$")]


class MediaBody(BaseModel):
    """Fields that pictures and clips share. A field that is null or absent takes the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: Prompt = Field(description="What to draw, in words.", examples=["a small red circle, white background"])
    model: Name | None = Field(None, description="A name from /v1/models; by default the first model of the kind.")
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto.", examples=["128x128"])
    negative_prompt: NegativePrompt | None = Field(None, description="What to avoid; needs true_cfg_scale above 1.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="The same seed gives the same bytes.")
    num_inference_steps: int | None = Field(None, ge=1, le=10_000, description="Solver steps.")
    guidance_scale: float | None = Field(None, ge=0, le=1000, description="Distilled guidance of FLUX.1-dev's kind.")
    true_cfg_scale: float | None = Field(None, ge=1, le=1000, description="Classifier-free guidance; 1 turns it off.")


class ImageBody(MediaBody):
    """POST /v1/images/generations"""

    n: int | None = Field(None, ge=1, le=1000, description="Pictures, with seeds seed, seed + 1, …")
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp, 100 is best.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    partial_images: int | None = Field(None, ge=0, le=3, description="Previews on the way; needs stream.")
    stream_progress: bool | None = Field(None, description="Add a troupe.progress event per step; needs stream.")
    background: Literal["opaque", "auto"] | None = None
    quality: Literal["auto"] | None = Field(None, description="Only auto: use num_inference_steps instead.")
    moderation: Literal["low", "auto"] | None = Field(None, description="Accepted; there is no moderation.")
    user: Name | None = None
    safety_identifier: Name | None = None


class VideoBody(MediaBody):
    """POST /v1/videos"""

    seconds: Seconds | Annotated[int, Field(ge=1, le=9999)] | None = Field(None, description="Length of the clip.")
    num_frames: int | None = Field(None, ge=1, le=100_000, description="Length in frames, instead of seconds.")
    fps: int | None = Field(None, ge=1, le=120, description="Frames a second.")


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
