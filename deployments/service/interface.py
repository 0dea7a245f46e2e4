"""The seam between HTTP and the rest: what the API asks of the application, free of HTTP and of tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import ConfigDict

from deployments.requests.fields import Quality
from engines.core.engine import Forwards
from engines.core.spec import Attention
from engines.gang.jobs.job import Progress as Progress
from pipelines.defaults import Defaults
from pipelines.description import NO_DESCRIPTION, Description
from pipelines.lora.source import LoraLimits
from pipelines.recipes import Recipe
from pipelines.request import NO_PICTURES, InputPictures, InputSound, Lora, MediaRequest

MediaFormat = Literal["png", "jpeg", "webp", "mp4"]
ModelPath = Literal["blocks", "whole pipeline"]
WHOLE: ModelPath = "whole pipeline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Format of the bytes."""

    format: MediaFormat
    """Format of the file."""
    compression: int = 100
    """Quality of JPEG and WebP, 0 to 100 as in OpenAI's API."""
    sound: InputSound | None = None
    """Sound of the input clip, for a result without one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """A served model: what requests may ask of it, and what answers say about it."""

    name: str
    """Its name in the API."""
    family: str
    """Name of the models that share its class of transformer."""
    created: int
    """The folder's mtime in Unix seconds."""
    defaults: Defaults
    """Defaults and limits of requests."""
    aliases: tuple[str, ...] = ()
    """Its other names in requests."""
    loras: tuple[Lora, ...] = ()
    """Adapters that requests may name, with their default scales."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """Defaults of requests that name them."""
    qualities: Mapping[Quality, str] = field(default_factory=dict)
    """Recipes of low, medium or high."""
    description: Description = NO_DESCRIPTION
    """Its subjects, and examples."""
    enhances_prompts: bool | None = None
    """The default of ``enhance_prompt``; None without a prompt enhancer."""
    path: ModelPath = "blocks"
    """Maker of steps: diffusers' blocks or the pipeline's own call."""
    forwards: Forwards | None = None
    """Form of the forwards of a whole pipeline; None for models with blocks, or before the first gang."""
    runtime_loras: LoraLimits | None = None
    """Limits of adapters that clients add; None: they may add none."""
    memory: Mapping[str, Any] | None = None
    """The savings of ``memory_gib``, as a JSON object."""
    attentions: tuple[Attention, ...] = ("auto",)
    """Precisions of attention that requests may name, the gang's own first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Times of a request by stage."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)  # the API's document has them

    queue_s: float
    """Time from the gang's admission to the first step."""
    encode_s: float
    """Prompt and pictures; next to 0 where they were cached."""
    denoise_s: float
    """Time from the first step to the last."""
    decode_s: float
    """Latents to the bytes of a file."""
    total_s: float
    """Wall-clock time from start to end."""
    was_warm: bool
    """Denoising needed no compilation or graph capture."""
    gpu_s: float = 0.0
    """Rank-seconds of its steps."""
    eta_s: float | None = None
    """``total_s`` as predicted at its arrival at the gang; None without a prediction."""
    same_bytes: bool = True
    """The same request always gives the same bytes. False for an elastic gang, which gives the same picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """A gang has taken the request."""

    eta_s: float | None
    """Predicted time from its arrival; None if nothing similar was measured."""
    decode_s: float | None = None
    """Part of it for decoding."""
    num_before: int = 0
    """Other requests that the gang had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """A picture decoded from the latents of a running job."""

    index: int
    """Number of the preview, from 0."""
    step: int
    """The step after which it was made."""
    data: bytes
    """PNG."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """The finished picture or clip."""

    data: bytes
    """The file; for a picture in layers, that of the lowest one."""
    format: MediaFormat
    """Format of the file."""
    seed: int
    """The seed that made it, given or random."""
    timings: StageTimes
    """Times by stage."""
    thumbnail: bytes = b""
    """A WebP of the first frame for clips, else empty."""
    further: tuple[bytes, ...] = ()
    """Files of the layers above the lowest one."""
    revised_prompt: str | None = None
    """The prompt of an enhancer, if it was used."""

    @property
    def files(self) -> tuple[bytes, ...]:
        """Returns everything that the request made, in order."""
        return (self.data, *self.further)


ServiceEvent = Queued | Progress | Preview | Media


class ModelUnavailableError(Exception):
    """One of the model's deployments does not take the request, and will not soon enough for it to wait.

    ``retry_after_s`` says when it may be worth another try.
    """

    def __init__(self, reason: str, retry_after_s: float = 10.0) -> None:
        super().__init__(reason, retry_after_s)
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


STATUS_MAX_AGE_S = 10.0
"""Fresh enough before a request: one that meets a broken gang waits for the next."""


class Service(Protocol):
    """The application behind the API.

    ``perform`` may be closed at any time, which cancels the job on all ranks. GPU time used by then is charged to the
    API key.
    """

    def cards(self) -> Mapping[str, ModelCard]: ...

    async def look(self) -> None:
        """Ask gangs for what ``cards`` say of them."""
        ...

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """Return the models that are not ready, each with the reason.

        While all is well, the answer may be about ``max_age_s`` old.
        """
        ...

    def retry_after_s(self, model: str) -> float:
        """Return the predicted seconds until ``model``, which is not ready, is ready."""
        ...

    def may_wait_for(self, model: str) -> bool:
        """Return whether ``model``, which is not ready, accepts requests that wait until it is rebuilt."""
        ...

    def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[ServiceEvent]:
        """Run one request with its ``pictures``. Yield ``Queued``, progress and previews, then exactly one ``Media``.

        If the gang breaks, it is rebuilt and the job runs again (its progress starts over). Raise ``GangBrokenError``
        after two broken gangs, ``QueueFullError`` if too many jobs wait, and ``ModelUnavailableError`` if a stage
        cannot be started in time.
        """
        ...

    async def load_lora(self, model: str, lora: Lora) -> None:
        """Load an adapter that came at run time on all gangs of ``model``; without any, on the next one.

        ValueError if it does not suit the model, ``ModelUnavailableError`` without a gang.
        """
        ...

    async def remove_lora(self, model: str, lora: Lora) -> None:
        """Let all gangs of ``model`` release an adapter once no request needs it."""
        ...
