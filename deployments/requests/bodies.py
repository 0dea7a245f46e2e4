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

ACCEPTED = "Accepted without effect."
STRENGTH = "How much of the picture or clip is repainted, up to 1; for models that take it."
SWITCH = "Switch of another server: only false is accepted."


class PeerFields(BaseModel):
    """Fields that clients of other servers always send. A value that would change the picture is refused."""

    generator_device: Annotated[Name, NoEffect("cuda")] | None = Field(
        None, description="Accepted without effect: noise is always drawn on the CPU."
    )
    bot_task: Annotated[Name, NoEffect("think")] | None = Field(
        None, description="Accepted without effect: prompt rewriting of another server."
    )
    extra_body: dict[str, object] | str | None = Field(
        None, description="More fields of this body, as a JSON object. In a form: the text of the JSON."
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

    prompt: Prompt = Field(
        description="Text to make the result from.", examples=["a small red circle, white background"]
    )
    model: Name | None = Field(
        None,
        description="A name or alias from /v1/models, or NAME:ADAPTER with one of its adapters or recipes. "
        "Default: the first model that makes this kind of media from these inputs.",
    )
    recipe: Name | None = Field(None, description="Recipe by its name in /v1/models: a set of defaults.")
    enhance_prompt: bool | None = Field(
        None, description="Let a language model rewrite the prompt. Default: the model's enhances_prompts."
    )
    size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels, or auto.", examples=["128x128"])
    width: Count | None = Field(None, description="Width in pixels, with height, instead of size.")
    height: Count | None = Field(None, description="Height in pixels, with width, instead of size.")
    negative_prompt: OptionalPrompt | None = Field(
        None, description="Text that describes what to avoid; needs true_cfg_scale above 1."
    )
    seed: int | None = Field(
        None, ge=RANDOM_SEED, le=MAX_SEED, description="The same seed gives the same bytes. -1: random."
    )
    num_inference_steps: Count | None = Field(
        None, description="Number of solver steps; takes precedence over quality."
    )
    quality: WrittenQuality | None = Field(
        None, description="Number of steps by name: low is half the model's default, high (hd) one and a half times."
    )
    guidance_scale: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="Scale of the model's guidance: distilled (FLUX.1-dev), or else classifier-free (Wan).",
    )
    true_cfg_scale: float | None = Field(
        None, ge=1, le=1000, description="Scale of classifier-free guidance; 1 turns it off."
    )
    guidance_scale_2: float | None = Field(
        None, ge=0, le=1000, description="true_cfg_scale of the second transformer (Wan 2.2); by default the same."
    )
    boundary_ratio: float | None = Field(
        None, ge=0, le=1, description="Share of the noise levels that the second transformer takes (Wan 2.2)."
    )
    scheduler: Name | None = Field(None, description="Solver: one of those in /v1/models.", examples=["euler"])
    flow_shift: float | None = Field(
        None, description="Constant shift of the schedule, instead of the model's own.", examples=[3.0]
    )
    sigmas: Steps | None = Field(
        None, description="Noise level of each step before the shift, descending. In a form: the text of the JSON."
    )
    timesteps: Steps | None = Field(
        None, description="Timestep of each step, descending, instead of sigmas; for models that take them."
    )
    lora: Loras | None = Field(
        None,
        description="Names of adapters in /v1/models, with their scales. In a form: the text of the JSON.",
        examples=[[{"name": "watercolour", "scale": 0.8}]],
    )
    cache: CacheMode | None = Field(
        None, description="Reuse of predictions: conservative at some steps, fast at half of them, off at none."
    )
    attention: Attention | None = Field(
        None, description="Precision of attention: one of the model's attentions in /v1/models; by default its first."
    )
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        None, description="Priority in the queue: flex waits longer, priority less. auto is default."
    )
    deadline_s: float | None = Field(
        None,
        ge=0.001,
        le=10**6,
        description="Deadline in seconds from arrival: 429 at once if it is predicted to be missed.",
    )
    style: Annotated[Literal["vivid", "natural"], NoEffect("vivid")] | None = Field(None, description=ACCEPTED)
    background: Background | None = Field(
        None,
        description="Colour (navy, #ff8800) beneath transparent parts of input pictures, instead of white. "
        "opaque, auto and transparent describe the result, which is opaque unless it has layers.",
    )
    moderation: Annotated[Literal["low", "auto"], NoEffect("low")] | None = Field(
        None, description="Accepted without effect: there is no moderation."
    )
    user: Annotated[Name, NoEffect("somebody")] | None = Field(
        None, description="Returned as safety_identifier with pictures."
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

    n: Count | None = Field(None, description="Number of pictures; their seeds are seed, seed + 1, …")
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="b64_json (default), or url: a link that lasts an hour."
    )
    output_format: Literal["png", "jpeg", "webp"] | None = Field(None, description="File format; default png.")
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp; 100, the default, is best."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    partial_images: int | None = Field(
        None, ge=0, le=3, description="Number of previews before the result; needs stream."
    )
    stream_progress: bool | None = Field(None, description="Send a troupe.progress event for each step; needs stream.")
    safety_identifier: Annotated[Name, NoEffect("somebody")] | None = Field(
        None, description="Returned in the answer, without effect."
    )


class EditBody(ImageBody):
    """Body of POST /v1/images/edits."""

    picture_fields = ("image", "images", "mask", "control_image")

    prompt: OptionalPrompt = Field(
        "", description="Text that describes the change; may be empty for models that describe the picture themselves."
    )
    image: Pictures | None = Field(None, description="Input pictures: PNG, JPEG or WebP, one or several.")
    images: Pictures | None = Field(None, description="The same as image, by OpenAI's name in JSON.")
    mask: Picture | None = Field(
        None,
        description="Mask of the area to repaint, as large as the first picture: its transparent or else white pixels.",
    )
    control_image: Picture | None = Field(
        None, description="Picture of edges, depths or a pose that the result follows; for models that take it."
    )
    control_scale: float | None = Field(None, ge=0, le=10, description="Weight of the control picture.")
    control_guidance_start: float | None = Field(
        None, ge=0, le=1, description="Share of the steps before the control picture takes effect."
    )
    control_guidance_end: float | None = Field(
        None, ge=0, le=1, description="Share of the steps after which the control picture has no effect."
    )
    strength: Strength | None = Field(None, description=STRENGTH)
    layers: Count | None = Field(
        None, description="Number of transparent layers to split the picture into; for models that do so."
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
    """Receiver of a message when the clip ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, StringConstraints(max_length=2048), WITHOUT_NUL] = Field(
        description="Address of the receiver, at a host in api.webhooks.hosts of the server."
    )
    secret: Annotated[str, StringConstraints(max_length=128), WITHOUT_NUL] = Field(
        description="Key that signs messages: whsec_ and the base64 of 24 to 64 random bytes."
    )


class VideoBody(MediaBody):
    """Body of POST /v1/videos."""

    picture_fields = ("input_reference", "video", "reference_video", "mask")

    input_reference: Pictures | None = Field(
        None, description="First frame, or pictures at several frames: PNG, JPEG or WebP."
    )
    frame_indices: FrameIndices | None = Field(
        None,
        description="Frame of each picture, from 0, or from the end with -1; for models that take it. In a form: the "
        "text of the JSON.",
    )
    video: Videos | None = Field(
        None,
        description="Input clip to change or to continue: MP4, MOV, WebM or GIF, or the id of a file or a clip. Some "
        "models take several.",
    )
    reference_video: Videos | None = Field(None, description="Another name of video.")
    keep_audio: bool | None = Field(
        None,
        description="Whether the sound of video is kept: as a reference for models that hear it, else in the result.",
    )
    mask: VideoMask | None = Field(
        None,
        description="Area to repaint, for models that take it: the white pixels of a clip as long as video, "
        "or of a picture for all frames.",
    )
    control_scale: float | None = Field(
        None, ge=0, le=10, description="Weight of the input clip; for models whose control_scale is not 0."
    )
    strength: Strength | None = Field(None, description=STRENGTH)
    second_stage_sigmas: Steps | None = Field(
        None,
        description="Noise levels of a second pass over the enlarged clip, in falling order; for models with a "
        "stage_scale. In a form: the text of the JSON.",
        examples=[[0.909375, 0.725, 0.421875]],
    )
    second_stage_lora: Loras | None = Field(None, description="Adapters of the second pass, in the form of lora.")
    seconds: Seconds | None = Field(
        None, description="Length of the clip in seconds; the model makes the nearest possible length."
    )
    num_frames: Count | None = Field(None, description="Length of the clip in frames, instead of seconds.")
    fps: int | None = Field(None, ge=1, le=120, description="Frames per second.")
    generate_sound: bool | None = Field(
        None, description="Whether the clip has sound. Default: make_sound of the model."
    )
    webhook: Annotated[WebhookBody, BeforeValidator(_webhook)] | None = Field(
        None,
        description="Receiver of a signed message at the end (Standard Webhooks). In a form: the text of the JSON.",
    )
    n: Annotated[Count, NoEffect(1)] | None = Field(None, description="Only 1 is allowed: a request makes one clip.")
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

    variant: Variant = Field("video", description="The MP4, a thumbnail, or the newest preview while the clip is made.")
