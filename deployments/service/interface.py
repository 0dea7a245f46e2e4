"""The seam between HTTP and the rest: what the API asks of the application, free of HTTP and of tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from deployments.requests.fields import Quality
from engines.core.spec import Attention
from engines.gang.jobs.job import Progress as Progress
from pipelines.defaults import Defaults
from pipelines.description import NO_DESCRIPTION, Description
from pipelines.lora.source import LoraLimits
from pipelines.recipes import Recipe
from pipelines.request import NO_PICTURES, InputPictures, Lora, MediaRequest

MediaFormat = Literal["png", "jpeg", "webp", "mp4"]
ModelPath = Literal["blocks", "whole pipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """How the bytes should come out. ``compression`` is 0–100 as in OpenAI's API (jpeg and webp)."""

    format: MediaFormat
    compression: int = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """A served model: name in the API, family, the folder's mtime (Unix seconds), defaults and limits.

    ``aliases``: its other names in requests. ``loras``: adapters that requests may name, with their default scales.
    ``recipes``: defaults of requests that name them. ``qualities``: the recipes of low, medium or high.
    ``description``: its subjects, and examples.
    ``enhances_prompts``: the default of ``enhance_prompt``; None without a prompt enhancer.
    ``path``: how steps are made, by diffusers' blocks or by the pipeline's own call. ``runtime_loras``: limits of
    adapters that clients add; None: they may add none. ``memory``: the savings of ``memory_gib``, as a JSON object.
    ``attentions``: precisions of attention that requests may name, the gang's own first.
    """

    name: str
    family: str
    created: int
    defaults: Defaults
    aliases: tuple[str, ...] = ()
    loras: tuple[Lora, ...] = ()
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    qualities: Mapping[Quality, str] = field(default_factory=dict)
    description: Description = NO_DESCRIPTION
    enhances_prompts: bool | None = None
    path: ModelPath = "blocks"
    runtime_loras: LoraLimits | None = None
    memory: Mapping[str, Any] | None = None
    attentions: tuple[Attention, ...] = ("auto",)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Where the time of a request went, in seconds; ``total_s`` is wall-clock from start to end.

    ``was_warm``: denoising needed no compilation or graph capture. ``gpu_s``: rank-seconds of its steps. ``eta_s``:
    ``total_s`` as predicted at its arrival at the gang; None without a prediction. ``same_bytes``: the same request
    always gives the same bytes; False for an elastic gang, where it gives the same picture.
    """

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    total_s: float
    was_warm: bool
    gpu_s: float = 0.0
    eta_s: float | None = None
    same_bytes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """A gang has taken the request.

    The request is predicted to take ``eta_s`` from its arrival, ``decode_s`` of it for decoding (None: nothing similar
    was measured). The gang had ``num_before`` other requests.
    """

    eta_s: float | None
    decode_s: float | None = None
    num_before: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """A picture (PNG bytes) decoded from the latents after ``step``; ``index`` counts previews from 0."""

    index: int
    step: int
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """The finished picture or clip; ``thumbnail`` is a WebP of the first frame for clips, else empty.

    For a picture in layers, ``data`` is the lowest one, and ``further`` are those above it. ``revised_prompt``: the
    prompt of an enhancer, if it was used.
    """

    data: bytes
    format: MediaFormat
    seed: int
    timings: StageTimes
    thumbnail: bytes = b""
    further: tuple[bytes, ...] = ()
    revised_prompt: str | None = None

    @property
    def files(self) -> tuple[bytes, ...]:
        """Returns everything that the request made, in order."""
        return (self.data, *self.further)


StudioEvent = Queued | Progress | Preview | Media


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


class Studio(Protocol):
    """The application behind the API.

    ``perform`` may be closed at any time, which cancels the job on all ranks. GPU time used by then is charged to the
    API key.
    """

    def cards(self) -> Mapping[str, ModelCard]: ...

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
    ) -> AsyncGenerator[StudioEvent]:
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
