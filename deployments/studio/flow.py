"""From request to media through the Serve deployments: encode, denoise, decode; run again if a gang breaks."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray import exceptions as ray_errors
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.observability.metrics import observe_failure, observe_stage
from deployments.stages.common import Decoded, Encoded
from deployments.studio.interface import (
    Media,
    ModelCard,
    ModelUnavailableError,
    Output,
    Preview,
    Progress,
    StudioEvent,
    Timings,
)
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.job import JobDone, JobEvent, PreviewReady, StepDone
from pipelines.request import MediaRequest

MAX_ATTEMPTS = 2
RECOVERY_DEADLINE_S = 180.0
"""From the loss of a gang that ran the request, or the first loss, until a step of it must have run again."""
RETRY_PAUSE_S = 0.25
RETRYABLE = (GangBrokenError, ray_errors.RayActorError, ray_errors.ObjectLostError)

logger = logging.getLogger("troupe.flow")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageHandles:
    """The three deployments of one model."""

    text_encoder: DeploymentHandle[Any]
    denoiser: DeploymentHandle[Any]
    decoder: DeploymentHandle[Any]


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """What one run through the stages has seen so far. ``alone``: beside no other job of its gang."""

    alone: bool
    started_s: float = field(default_factory=time.perf_counter)
    num_steps_seen: int = 0
    num_previews: int = 0
    done: JobDone | None = None
    decoding: Any = None
    """The response that will be ``Decoded``."""


class Flow:
    """Runs requests for all served models."""

    def __init__(self, cards: Mapping[str, ModelCard], stages: Mapping[str, StageHandles]) -> None:
        self._cards, self._stages = cards, stages

    def cards(self) -> Mapping[str, ModelCard]:
        return self._cards

    def gang_lost(self) -> None:
        """Told whenever a request has lost its gang."""

    async def perform(self, request: MediaRequest, output: Output) -> AsyncGenerator[StudioEvent]:
        """See ``Studio.perform``."""
        num_broken = 0
        give_up_s: float | None = None
        while True:
            # After a broken gang all that ran on it are suspects. Alone, each shows whether it was the cause.
            attempt = _Attempt(alone=num_broken > 0)
            try:
                with _unwrapped():
                    async with aclosing(self._attempt(request, output, attempt)) as events:
                        async for event in events:
                            yield event
                return
            except QueueFullError:
                # The gang that it lost had room for this request, so it waits for room in the new one.
                if give_up_s is None or time.monotonic() > give_up_s:
                    raise
            except RETRYABLE as error:
                if give_up_s is None or attempt.num_steps_seen:  # however long it ran: recovery begins now
                    give_up_s = time.monotonic() + RECOVERY_DEADLINE_S
                num_broken += _counts(error, attempt)
                self.gang_lost()
                observe_failure(request.model, type(error).__name__)
                logger.warning("request %s lost its gang (%s): %s", request.request_id, num_broken, error)
                if num_broken >= MAX_ATTEMPTS or time.monotonic() > give_up_s:
                    raise GangBrokenError(f"given up after {num_broken} broken gangs; the last: {error}") from error
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _attempt(self, request: MediaRequest, output: Output, attempt: _Attempt) -> AsyncGenerator[StudioEvent]:
        stages = self._stages[request.model]
        encoding: Any = stages.text_encoder.encode.remote(request)
        async with aclosing(_job_events(stages, request, encoding, attempt.alone)) as events:
            async for event in events:
                async for seen in _translate(stages, request, output, event, attempt):
                    yield seen
        assert attempt.done is not None, "the gang ended a job without JobDone"
        encoded, decoded = await encoding, await attempt.decoding
        timings = _timings(attempt, attempt.done, encoded, decoded)
        _observe(request.model, timings)
        yield Media(
            data=decoded.data, format=output.format, seed=request.seed, timings=timings, thumbnail=decoded.thumbnail
        )


@contextmanager
def _unwrapped() -> Iterator[None]:
    """What a deployment raised, as it was raised there: the text of Ray's wrapping is a coloured traceback."""
    try:
        yield
    except ray_errors.RayTaskError as error:
        raise error.cause from error
    except DeploymentUnavailableError as error:
        raise ModelUnavailableError(error.message) from error


async def _job_events(
    stages: StageHandles, request: MediaRequest, encoding: DeploymentResponse[Encoded], alone: bool
) -> AsyncGenerator[JobEvent]:
    """The denoiser's stream. Left early (the client went away), it is cancelled, which stops the job on all ranks.

    ``encoding`` may be under way: the denoiser waits for it, so that the way there takes no time of its own, and what
    the encoder raised is raised here.
    """
    job_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
    encoded = [await encoding._to_object_ref()]
    stream: Any = stages.denoiser.options(stream=True).denoise.remote(job_id, request, encoded, alone)
    try:
        async for group in stream:
            for event in group:
                yield event
    except BaseException:
        stream.cancel()
        raise


async def _translate(
    stages: StageHandles, request: MediaRequest, output: Output, event: JobEvent, attempt: _Attempt
) -> AsyncGenerator[StudioEvent]:
    match event:
        case StepDone():
            attempt.num_steps_seen += 1
            yield Progress(
                step=event.step, num_steps=event.num_steps, eta_s=event.step_ms / 1e3 * (event.num_steps - event.step)
            )
        case PreviewReady():
            data = await stages.decoder.preview.remote([event.latents], request)
            yield Preview(index=attempt.num_previews, step=event.step, data=data)
            attempt.num_previews += 1
        case JobDone():
            attempt.done = event
            attempt.decoding = stages.decoder.decode.remote([event.latents], request, output)


def _counts(error: BaseException, attempt: _Attempt) -> bool:
    """Whether a lost gang counts against the request: it ran on it, and was not merely waiting, or the gang closed."""
    if isinstance(error, GangBrokenError):
        return error.in_flight and error.cause != "closed"
    return attempt.num_steps_seen > 0


def _timings(attempt: _Attempt, done: JobDone, encoded: Encoded, decoded: Decoded) -> Timings:
    return Timings(
        queue_s=done.queue_s,
        encode_s=encoded.encode_s,
        denoise_s=done.denoise_s,
        decode_s=decoded.decode_s,
        total_s=time.perf_counter() - attempt.started_s,
        was_warm=done.was_warm,
    )


def _observe(model: str, timings: Timings) -> None:
    for stage in ("queue", "encode", "denoise", "decode", "total"):
        observe_stage(stage, model, getattr(timings, f"{stage}_s"))
