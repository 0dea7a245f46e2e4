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

from deployments.asyncio_tools import merge
from deployments.observability.metrics import observe_failure, observe_stage
from deployments.stages.common import Decoded, Encoded
from deployments.studio.interface import (
    STATUS_MAX_AGE_S,
    Media,
    ModelCard,
    ModelUnavailableError,
    Output,
    Preview,
    Progress,
    StageTimes,
    StudioEvent,
)
from deployments.studio.readiness import Readiness
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
class _Run:
    """What one run through the stages has seen so far. ``exclusive``: beside no other job of its gang."""

    exclusive: bool
    started_s: float = field(default_factory=time.perf_counter)
    num_steps_seen: int = 0
    previews: asyncio.Queue[PreviewReady | None] = field(default_factory=asyncio.Queue)
    """Latents to decode in this order; None after the last."""
    done: JobDone | None = None
    decoding: Any = None
    """The response that will be ``Decoded``."""


class DeployedStudio:
    """A ``Studio`` of Serve deployments: runs requests for all served models."""

    def __init__(
        self, cards: Mapping[str, ModelCard], stages: Mapping[str, StageHandles], readiness: Readiness
    ) -> None:
        self._cards, self._stages, self._readiness = cards, stages, readiness

    def cards(self) -> Mapping[str, ModelCard]:
        return self._cards

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """See ``Studio.not_ready``."""
        return await self._readiness.not_ready(max_age_s)

    async def perform(self, request: MediaRequest, output: Output) -> AsyncGenerator[StudioEvent]:
        """See ``Studio.perform``."""
        num_broken = 0
        give_up_s: float | None = None
        while True:
            # After a broken gang all that ran on it are suspects. Alone, each shows whether it was the cause.
            run = _Run(exclusive=num_broken > 0)
            try:
                with _unwrapped():
                    async with aclosing(self._run(request, output, run)) as events:
                        async for event in events:
                            yield event
                return
            except QueueFullError:
                # The gang that it lost had room for this request, so it waits for room in the new one.
                if give_up_s is None or time.monotonic() > give_up_s:
                    raise
            except RETRYABLE as error:
                if give_up_s is None or run.num_steps_seen:  # however long it ran: recovery begins now
                    give_up_s = time.monotonic() + RECOVERY_DEADLINE_S
                num_broken += _counts(error, run)
                self._readiness.gang_lost()
                observe_failure(request.model, type(error).__name__)
                logger.warning("request %s lost its gang (%s): %s", request.request_id, num_broken, error)
                if num_broken >= MAX_ATTEMPTS or time.monotonic() > give_up_s:
                    raise GangBrokenError(f"given up after {num_broken} broken gangs; the last: {error}") from error
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _run(self, request: MediaRequest, output: Output, run: _Run) -> AsyncGenerator[StudioEvent]:
        stages = self._stages[request.model]
        encoding: Any = stages.text_encoder.encode.remote(request)
        events = merge(_denoised(stages, request, output, encoding, run), _previews(stages, request, run))
        async with aclosing(events):
            async for event in events:
                yield event
        assert run.done is not None, "the gang ended a job without JobDone"
        encoded, decoded = await encoding, await run.decoding
        timings = _timings(run, run.done, encoded, decoded)
        _observe(request.model, timings)
        yield Media(
            data=decoded.data, format=output.format, seed=request.seed, timings=timings, thumbnail=decoded.thumbnail
        )


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raises what a deployment raised as it was raised there: the text of Ray's wrapping is a coloured traceback."""
    try:
        yield
    except ray_errors.RayTaskError as error:
        raise error.cause from error
    except DeploymentUnavailableError as error:
        raise ModelUnavailableError(error.message) from error


async def _job_events(
    stages: StageHandles, request: MediaRequest, encoding: DeploymentResponse[Encoded], exclusive: bool
) -> AsyncGenerator[JobEvent]:
    """Yields the denoiser's stream. Closed early (the client went away), it is cancelled: the job stops on all ranks.

    ``encoding`` may be under way: the denoiser waits for it, so that the way there takes no time of its own, and what
    the encoder raised is raised here.
    """
    job_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
    encoded = [await encoding._to_object_ref()]
    stream: Any = stages.denoiser.options(stream=True).denoise.remote(job_id, request, encoded, exclusive)
    try:
        async for group in stream:
            for event in group:
                yield event
    except BaseException:
        stream.cancel()
        raise


async def _denoised(
    stages: StageHandles, request: MediaRequest, output: Output, encoding: DeploymentResponse[Encoded], run: _Run
) -> AsyncGenerator[StudioEvent]:
    """Yields the job's progress. Its previews go to ``run``; the decoding of its result has begun at the end."""
    async with aclosing(_job_events(stages, request, encoding, run.exclusive)) as events:
        async for event in events:
            match event:
                case StepDone():
                    run.num_steps_seen += 1
                    eta_s = event.step_ms / 1e3 * (event.num_steps - event.step)
                    yield Progress(step=event.step, num_steps=event.num_steps, eta_s=eta_s)
                case PreviewReady():
                    run.previews.put_nowait(event)
                case JobDone():
                    run.done = event
                    run.decoding = stages.decoder.decode.remote([event.latents], request, output)
    run.previews.put_nowait(None)


async def _previews(stages: StageHandles, request: MediaRequest, run: _Run) -> AsyncGenerator[StudioEvent]:
    """Yields the job's previews in order, each once it is decoded. The job goes on meanwhile."""
    index = 0
    while ready := await run.previews.get():
        data = await stages.decoder.preview.remote([ready.latents], request)
        yield Preview(index=index, step=ready.step, data=data)
        index += 1


def _counts(error: BaseException, run: _Run) -> bool:
    """Returns whether a lost gang counts against the request: that ran on it, and the gang was not closed."""
    if isinstance(error, GangBrokenError):
        return error.in_flight and error.cause != "closed"
    return run.num_steps_seen > 0


def _timings(run: _Run, done: JobDone, encoded: Encoded, decoded: Decoded) -> StageTimes:
    return StageTimes(
        queue_s=done.queue_s,
        encode_s=encoded.encode_s,
        denoise_s=done.denoise_s,
        decode_s=decoded.decode_s,
        total_s=time.perf_counter() - run.started_s,
        was_warm=done.was_warm,
    )


def _observe(model: str, timings: StageTimes) -> None:
    for stage in ("queue", "encode", "denoise", "decode", "total"):
        observe_stage(stage, model, getattr(timings, f"{stage}_s"))
