"""Bodies of requests, made of ``fields``. Rules that depend on the model are in ``rules``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from deployments.clips.storage import Variant
from deployments.requests.fields import (
    MAX_SEED,
    RANDOM_SEED,
    RESULT_BACKGROUNDS,
    WITHOUT_NUL,
    Background,
    Count,
    FrameIndices,
    Loras,
    Name,
    NoEffect,
    Off,
    OptionalPrompt,
    Picture,
    Pictures,
    Prompt,
    Seconds,
    Size,
    Steps,
    Strength,
    VideoMask,
    Videos,
    WrittenQuality,
    from_text,
)
from deployments.requests.pictures.sources import Sources
from engines.core.spec import Attention
from pipelines.caching import CacheMode

ACCEPTED = "Accepted, without effect."
STRENGTH = "How much of the picture or clip is painted anew, up to 1; for models that take it."
SWITCH = "Another server's switch: accepted while it is off."


class PeerFields(BaseModel):
    """Fields that clients of other servers always send. A value that would change the picture is refused."""

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

    prompt: Prompt = Field(description="The subject, in words.", examples=["a small red circle, white background"])
    model: Name | None = Field(
        None,
        description="A name or alias from /v1/models, or NAME:ADAPTER with one of its adapters or recipes. "
        "By default the first model of the kind that takes the pictures.",
    )
    recipe: Name | None = Field(
        None, description="Defaults by their name in /v1/models; what the request says itself wins."
    )
    enhance_prompt: bool | None = Field(
        None, description="Whether a language model rewrites the prompt first; by default what the model's card says."
    )
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto.", examples=["128x128"])
    width: Count | None = Field(None, description="Pixels, with height; instead of size.")
    height: Count | None = Field(None, description="Pixels, with width; instead of size.")
    negative_prompt: OptionalPrompt | None = Field(
        None, description="Things to avoid; needs classifier-free guidance: true_cfg_scale above 1."
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
    attention: Attention | None = Field(
        None, description="Precision of attention: one of the model's attentions in /v1/models; by default its first."
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
        "opaque, auto and transparent describe the result, which is opaque unless it has layers.",
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
        "", description="The wanted change, in words; may be empty where the model describes the pictures itself."
    )
    image: Pictures | None = Field(None, description="The pictures to change: PNG, JPEG or WebP, one or several.")
    images: Pictures | None = Field(None, description="The same as image, by its name in JSON.")
    mask: Picture | None = Field(
        None, description="Where to paint, as large as the first picture: what is transparent in it, or else white."
    )
    control_image: Picture | None = Field(
        None, description="A picture that the result follows, for models that take it: edges, depths, a pose."
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
    written = from_text(written)
    if not isinstance(written, Mapping) or set(written) != {"url", "secret"}:
        raise PydanticCustomError("webhook", 'it must be {"url": "https://…", "secret": "whsec_…"}')
    return written


class WebhookBody(BaseModel):
    """Receiver of the message about the end of a clip."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, StringConstraints(max_length=2048), WITHOUT_NUL] = Field(
        description="At a host that the server allows."
    )
    secret: Annotated[str, StringConstraints(max_length=128), WITHOUT_NUL] = Field(
        description="whsec_ and the base64 of 24 to 64 random bytes, by which messages are signed."
    )


class VideoBody(MediaBody):
    """Body of POST /v1/videos."""

    picture_fields = ("input_reference", "video", "reference_video", "mask")

    input_reference: Pictures | None = Field(
        None, description="The picture to begin with, or several at frames: PNG, JPEG or WebP."
    )
    frame_indices: FrameIndices | None = Field(
        None,
        description="The frame of each picture, counted from 0, or from the end with -1; for models that take it. In a "
        "form: the text of the JSON.",
    )
    video: Videos | None = Field(
        None,
        description="The clip to change or to continue: MP4, MOV, WebM or GIF, or the id of a file or a clip; several "
        "for models that take them.",
    )
    reference_video: Videos | None = Field(None, description="The same as video, by another name.")
    keep_audio: bool | None = Field(
        None,
        description="Whether the sound of video is kept: models that hear it take it as a reference, others put it "
        "into the result.",
    )
    mask: VideoMask | None = Field(
        None,
        description="Where the clip is made anew, for models that take it: what is white in a clip as long as video, "
        "or in a picture for all frames.",
    )
    control_scale: float | None = Field(
        None, ge=0, le=10, description="Weight of the input clip, for models that have one."
    )
    strength: Strength | None = Field(None, description=STRENGTH)
    second_stage_sigmas: Steps | None = Field(
        None,
        description="Noise levels of a second pass over the enlarged clip, falling; for models with a stage_scale. In "
        "a form: the text of the JSON.",
        examples=[[0.909375, 0.725, 0.421875]],
    )
    second_stage_lora: Loras | None = Field(
        None, description="Adapters of the second pass, as in lora, which are those of the first."
    )
    seconds: Seconds | None = Field(None, description="Length of the clip; the nearest that the model can make.")
    num_frames: Count | None = Field(None, description="Length in frames, instead of seconds.")
    fps: int | None = Field(None, ge=1, le=120, description="Frames a second.")
    generate_sound: bool | None = Field(
        None, description="Whether the clip has a sound; by default as its model does, whose make_sound says it."
    )
    webhook: Annotated[WebhookBody, BeforeValidator(_webhook)] | None = Field(
        None,
        description="Receiver of a signed request at its end (Standard Webhooks). In a form: the text of the JSON.",
    )
    n: Annotated[Count, NoEffect(1)] | None = Field(None, description="Only 1: a request makes one clip.")
    num_outputs_per_prompt: Annotated[Count, NoEffect(1)] | None = Field(None, description="The same as n.")

    @property
    def sources(self) -> Sources:
        """See ``MediaBody.sources``."""
        pictures = self.input_reference or ()
        videos = (self.video or ()) + (self.reference_video or ())
        return Sources(
            param="input_reference",
            pictures=pictures,
            video=videos[0] if videos else None,
            further_videos=videos[1:],
            video_mask=self.mask,
        )


class ListQuery(BaseModel):
    """Query of GET /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, description="The last id of the previous page.")
    limit: int = Field(20, ge=1, le=100, description="Entries on a page.")


class PageQuery(ListQuery):
    """Query of GET /v1/videos."""

    order: Literal["asc", "desc"] = Field("desc", description="Order of creation: desc has the newest first.")


class FilesQuery(PageQuery):
    """Query of GET /v1/files."""

    purpose: Literal["batch", "batch_output", "user_data"] | None = Field(
        None, description="Files of this purpose only."
    )


class ContentQuery(BaseModel):
    """Query of GET /v1/videos/{video_id}/content."""

    model_config = ConfigDict(extra="forbid")

    variant: Variant = Field("video", description="preview: the last one of a clip that is being made.")
