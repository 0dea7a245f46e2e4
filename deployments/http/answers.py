"""Answers of the API, in OpenAI's shapes. The description of a field that OpenAI lacks says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from deployments.clips.database import ClipRecord
from deployments.http.streams import Event
from deployments.requests.fields import Quality
from deployments.requests.model_choice import BEHIND
from deployments.requests.recipe_choice import recipe_defaults, recipe_document, steps_of_quality
from deployments.requests.rules import QUALITY_SHARES
from deployments.service.interface import ModelCard, ModelPath, Progress, StageTimes
from engines.core.engine import Forwards
from engines.core.spec import Attention
from pipelines.caching import CacheMode
from pipelines.defaults import Defaults
from pipelines.request import MediaKind

Background = Literal["opaque", "transparent"]
LAYER = "Number of the layer, from 0, the lowest; null for pictures without layers. Beyond OpenAI."
REVISED = "The rewritten prompt; null if the prompt was not changed."
CACHE = "Step cache of the request; beyond OpenAI."


class ModelLora(BaseModel):
    """An adapter of a model."""

    name: str
    scale: float = Field(description="Default scale.")


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "troupe"
    kind: MediaKind = Field(description="image or video; beyond OpenAI")
    kinds: tuple[MediaKind, ...] = Field(description="Kinds of media that it makes, its kind first; beyond OpenAI.")
    family: str = Field(description="Models of the same architecture; beyond OpenAI.")
    path: ModelPath = Field(description="Execution path: blocks, or the whole pipeline's call. Beyond OpenAI.")
    forwards: Forwards | None = Field(
        description="How forwards of a whole pipeline run; null for other models, or before a gang has started. "
        "Beyond OpenAI."
    )
    aliases: tuple[str, ...] = Field(description="Other names of the model; beyond OpenAI.")
    loras: tuple[ModelLora, ...] = Field(
        description="Adapters that requests may name, with their scales; beyond OpenAI."
    )
    takes_loras: bool = Field(description="Whether clients may add adapters; beyond OpenAI.")
    enhances_prompts: bool | None = Field(
        description="Default of enhance_prompt; null without a prompt enhancer. Beyond OpenAI."
    )
    recipes: dict[str, dict[str, Any]] = Field(
        description="Recipes that requests may name: the fields that each changes, and its likeness; beyond OpenAI."
    )
    attentions: tuple[Attention, ...] = Field(
        description="Precisions of attention that requests may name, the model's own first; beyond OpenAI."
    )
    qualities: dict[Quality, str] = Field(description="Recipe for each quality that has one; beyond OpenAI.")
    memory: dict[str, Any] | None = Field(
        description="Savings that memory_gib chose, and their predicted cost; beyond OpenAI."
    )
    parent: str | None = Field(default=None, description="Base model of an adapter's or recipe's entry; beyond OpenAI.")
    description: str = Field(description="Subjects that the model draws, if its folder names them; beyond OpenAI.")
    sizes: tuple[str, ...] = Field(
        description="Recommended values of size; others within the limits are allowed. Beyond OpenAI."
    )
    steps: dict[Quality, int] = Field(description="Number of steps of each quality; beyond OpenAI.")
    prompts: tuple[str, ...] = Field(description="Example prompts; beyond OpenAI.")
    capabilities: tuple[str, ...] = Field(
        description="Kinds of requests, such as text-to-image or video-to-video; beyond OpenAI."
    )
    edits: bool = Field(description="Whether it edits pictures by the prompt, without strength; beyond OpenAI.")
    defaults: Defaults = Field(description="Defaults and limits; beyond OpenAI.")
    picture_defaults: Defaults | None = Field(
        description="Defaults of pictures for a model that also makes clips; else null. Beyond OpenAI."
    )

    @classmethod
    def of(cls, card: ModelCard) -> Model:
        defaults, description = card.defaults, card.description
        return cls(
            id=card.name,
            created=card.created,
            kind=defaults.kind,
            kinds=defaults.kinds,
            family=card.family,
            path=card.path,
            forwards=card.forwards,
            aliases=card.aliases,
            loras=tuple(
                ModelLora(name=lora.name, scale=lora.scale) for lora in card.loras if lora.name not in card.recipes
            ),
            takes_loras=card.runtime_loras is not None,
            recipes={name: recipe_document(name, recipe, card) for name, recipe in card.recipes.items()},
            attentions=card.attentions,
            qualities=dict(card.qualities),
            enhances_prompts=card.enhances_prompts,
            memory=None if card.memory is None else dict(card.memory),
            description=description.text,
            sizes=description.sizes_within(defaults),
            steps={quality: steps_of_quality(quality, card) for quality in QUALITY_SHARES},
            prompts=description.prompts,
            capabilities=defaults.capabilities,
            edits=defaults.edits,
            defaults=defaults,
            picture_defaults=defaults.of("image") if "image" in defaults.kinds[1:] else None,
        )

    @classmethod
    def all_of(cls, card: ModelCard) -> Iterator[Model]:
        """Yield the model, then the model with each adapter and recipe, under the names that requests may use."""
        model = cls.of(card)
        yield model
        for name in dict.fromkeys((*(lora.name for lora in card.loras), *card.recipes)):
            nothing: dict[str, Any] = {"aliases": (), "loras": (), "recipes": {}, "qualities": {}}
            changes = {**nothing, "id": f"{card.name}{BEHIND}{name}", "parent": card.name}
            if name in card.recipes:
                defaults = recipe_defaults(name, card)
                steps = {quality: steps_of_quality(quality, card, name) for quality in model.steps}
                pictures = None if model.picture_defaults is None else defaults.of("image")
                changes |= {"defaults": defaults, "steps": steps, "picture_defaults": pictures}
            yield model.model_copy(update=changes)


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: Literal["ready", "not_ready"]
    models: dict[str, str] = Field(description="State by model: ready, or the reason why not.")
    storage: str = Field(description="ok, or the reason why clips cannot be stored; pictures can still be made.")


class Usage(BaseModel):
    """Token usage, which OpenAI's clients require: always 0, since Troupe counts no tokens."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: dict[str, int] = {"image_tokens": 0, "text_tokens": 0}


class Image(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = Field(default=None, description=REVISED)
    seed: int = Field(description="Seed that reproduces this picture; beyond OpenAI.")
    layer: int | None = Field(default=None, description=LAYER)


class ImagesResponse(BaseModel):
    created: int
    data: list[Image]
    output_format: str
    size: str
    background: Background = "opaque"
    quality: Quality | None = Field(
        description="Quality that chose the number of steps; null if num_inference_steps was given."
    )
    num_inference_steps: int = Field(description="Beyond OpenAI.")
    cache: CacheMode = Field(description=CACHE)
    safety_identifier: str | None = None
    usage: Usage = Usage()


class PartialPicture(Event):
    b64_json: str
    partial_image_index: int
    created_at: int
    output_format: str = "png"
    size: str
    background: str = "opaque"
    quality: Quality | Literal["auto"] = "auto"
    image_index: int = Field(description="Number of the picture in the request, from 0; beyond OpenAI.")
    step: int = Field(description="Step after which it was decoded; beyond OpenAI.")


class PartialImage(PartialPicture):
    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"


class PartialEdit(PartialPicture):
    type: Literal["image_edit.partial_image"] = "image_edit.partial_image"


class CompletedPicture(Event):
    b64_json: str
    created_at: int
    output_format: str
    size: str
    background: Background = "opaque"
    quality: Quality | Literal["auto"] = "auto"
    num_inference_steps: int = Field(description="Beyond OpenAI.")
    cache: CacheMode = Field(description=CACHE)
    usage: Usage = Usage()
    safety_identifier: str | None = None
    revised_prompt: str | None = Field(default=None, description=f"{REVISED} Beyond OpenAI.")
    image_index: int = Field(description="Number of the picture in the request, from 0; beyond OpenAI.")
    layer: int | None = Field(default=None, description=LAYER)
    seed: int = Field(description="Beyond OpenAI.")
    timings: StageTimes = Field(description="Beyond OpenAI.")


class CompletedImage(CompletedPicture):
    type: Literal["image_generation.completed"] = "image_generation.completed"


class CompletedEdit(CompletedPicture):
    type: Literal["image_edit.completed"] = "image_edit.completed"


class QueuedPicture(Event):
    type: Literal["troupe.queued"] = "troupe.queued"
    image_index: int
    num_before: int = Field(description="Number of other requests in the gang when it took this one.")
    eta_s: float | None = Field(description="Predicted seconds until it is done; null without a prediction.")


class StepProgress(Event):
    type: Literal["troupe.progress"] = "troupe.progress"
    image_index: int
    step: int
    of: int
    eta_s: float | None = Field(description="Predicted seconds until its steps are done; null without a prediction.")

    @classmethod
    def of_picture(cls, index: int, event: Progress) -> StepProgress:
        return cls(image_index=index, step=event.step, of=event.num_steps, eta_s=event.eta_s)


class VideoError(BaseModel):
    code: str
    message: str


class Video(BaseModel):
    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(ge=0, le=100, description="Percentage of the steps; 100 once the file is available.")
    created_at: int
    completed_at: int | None
    expires_at: int | None = None
    prompt: str
    revised_prompt: str | None = Field(default=None, description=f"{REVISED} Beyond OpenAI.")
    remixed_from_video_id: str | None = Field(default=None, description="Id of the input clip, if it was made here.")
    seconds: str
    size: str
    error: VideoError | None
    seed: int = Field(description="Seed that reproduces this clip; beyond OpenAI.")
    num_frames: int = Field(description="Beyond OpenAI.")
    fps: int = Field(description="Beyond OpenAI.")
    num_outputs: Literal[1] = Field(default=1, description="Number of clips of the request; beyond OpenAI.")
    num_inference_steps: int = Field(description="Beyond OpenAI.")
    cache: CacheMode = Field(description=CACHE)
    eta_s: float | None = Field(
        description="Predicted seconds until it is done; null once it has ended. Beyond OpenAI."
    )
    num_before: int | None = Field(
        description="Number of clips of its model ahead in the queue; null unless it waits. Beyond OpenAI."
    )
    num_previews: int = Field(
        description="Number of previews so far; variant=preview returns the newest. Beyond OpenAI."
    )
    timings: StageTimes | None = Field(description="Beyond OpenAI.")

    @classmethod
    def of(cls, clip: ClipRecord) -> Video:
        request = clip.request
        return cls(
            id=clip.id,
            model=request.model,
            status=clip.status,
            progress=clip.progress,
            created_at=clip.created_at,
            completed_at=clip.completed_at,
            prompt=request.prompt if request.given_prompt is None else request.given_prompt,
            revised_prompt=request.revised_prompt,
            remixed_from_video_id=request.source_clip_id,
            seconds=clip.seconds,
            size=f"{request.width}x{request.height}",
            error=VideoError(code=clip.error.code, message=clip.error.message) if clip.error else None,
            seed=request.seed,
            num_frames=request.num_frames,
            fps=request.fps,
            num_inference_steps=request.num_inference_steps,
            cache=request.cache,
            eta_s=None if clip.eta_s is None else round(clip.eta_s, 3),
            num_before=clip.num_before,
            num_previews=clip.num_previews,
            timings=clip.timings,
        )


def page_ends(data: Sequence[Any]) -> dict[str, str | None]:
    """Return the fields ``first_id`` and ``last_id`` of a page, None without entries."""
    return {"first_id": data[0].id if data else None, "last_id": data[-1].id if data else None}


class VideoPage(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, clips: list[ClipRecord], has_more: bool) -> VideoPage:
        data = [Video.of(clip) for clip in clips]
        return cls(data=data, **page_ends(data), has_more=has_more)


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class VideoEvent(Event):
    """Event of a clip: video.progress at each change, at the end video.completed, video.failed or video.deleted."""

    type: Literal["video.progress", "video.completed", "video.failed", "video.deleted"]
    video: Video | None
