"""Path of a request to its media through the Serve deployments, with retries if a gang breaks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from ray import exceptions as ray_errors
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.observability.metrics import REQUEST_FAILURES
from deployments.ray_private import leave_replica
from deployments.service.interface import (
    STATUS_MAX_AGE_S,
    WHOLE,
    Media,
    ModelCard,
    ModelUnavailableError,
    Output,
    ServiceEvent,
)
from deployments.service.readiness import Readiness
from deployments.service.retries import RECOVERY_DEADLINE_S, RETRYABLE, Retries
from deployments.service.run import Run, StageHandles
from deployments.stages.measured_times import DecodeTimes
from deployments.usage.accounts import Accounts
from deployments.usage.metering import UsageMeter
from engines.core.engine import Forwards, JobFailedError
from engines.gang.errors import GangBrokenError, QueueFullError
from pipelines.request import NO_PICTURES, InputPictures, Lora, MediaRequest

RETRY_PAUSE_S = 0.25
LOAD_WITHIN_S = 300.0
"""Time for all gangs to read an adapter."""
LOOK_WITHIN_S = 2.0
"""Time for the status of all gangs."""
NOT_REACHED = (TimeoutError, DeploymentUnavailableError, *RETRYABLE)
"""Errors of a call to all gangs; the second means that there are none."""

logger = logging.getLogger("troupe.flow")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Limits of a model's gangs together."""

    max_jobs: float = math.inf
    """Running and waiting jobs."""
    max_wait_s: float | None = None
    """Longest wait of a request; None: as long as a recovery may take."""


ANY = QueueLimits()
NO_LIMITS: Mapping[str, QueueLimits] = MappingProxyType({})
NO_PATIENCE: Mapping[str, float] = MappingProxyType({})


class DeployedService:
    """A ``Service`` of Serve deployments: runs requests for all served models.

    ``patience_s``: by model, the seconds that requests wait for a replica, if not RECOVERY_DEADLINE_S. ``limits``: of
    the model's gangs, which also hold for requests that wait for a gang. Costs are charged to ``accounts``, by default
    to new ones.
    """

    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        stages: Mapping[str, StageHandles],
        readiness: Readiness,
        patience_s: Mapping[str, float] = NO_PATIENCE,
        accounts: Accounts | None = None,
        limits: Mapping[str, QueueLimits] = NO_LIMITS,
    ) -> None:
        self._cards, self._stages, self._readiness, self._patience_s = dict(cards), stages, readiness, patience_s
        self._unknown_forwards = tuple(
            name for name, card in cards.items() if card.path == WHOLE and card.forwards is None
        )
        self._limits = limits
        self._num_open: defaultdict[str, int] = defaultdict(int)
        self._job_s: dict[str, float] = {}
        """Seconds of all steps of each model's newest finished request."""
        self.meter = UsageMeter(accounts or Accounts())
        self._decode_times: defaultdict[str, DecodeTimes] = defaultdict(DecodeTimes)

    def cards(self) -> Mapping[str, ModelCard]:
        return self._cards

    async def look(self) -> None:
        """See ``Service.look``. Without an answer, cards stay as they are."""
        await asyncio.gather(*(self._ask_forwards(model) for model in self._unknown_forwards))

    async def _ask_forwards(self, model: str) -> None:
        answers = list[object]()
        with suppress(*NOT_REACHED):
            asked = self._stages[model].denoiser.broadcast("forwards")
            answers = await asked.results_async(timeout_s=LOOK_WITHIN_S, return_exceptions=True)
        found = {answer for answer in answers if isinstance(answer, str)}
        if found:
            forwards: Forwards = "compiled" if found == {"compiled"} else "eager"
            self._cards[model] = replace(self._cards[model], forwards=forwards)

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """See ``Service.not_ready``."""
        return await self._readiness.not_ready(max_age_s)

    def retry_after_s(self, model: str) -> float:
        """See ``Service.retry_after_s``."""
        return self._readiness.retry_after_s(model)

    def may_wait_for(self, model: str) -> bool:
        """See ``Service.may_wait_for``. Where it is expected to take longer than requests may wait, it is no use."""
        longest_s = self._limits.get(model, ANY).max_wait_s
        is_soon = longest_s is None or self._readiness.retry_after_s(model) <= longest_s
        return self._readiness.is_rebuilt(model) and is_soon

    async def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[ServiceEvent]:
        """See ``Service.perform``."""
        model = request.model
        patience_s, limits = self._patience_s.get(model, RECOVERY_DEADLINE_S), self._limits.get(model, ANY)
        with self.meter.metered(request) as finish, self._counted(model, limits.max_jobs) as accepted:
            retries = Retries(request, self._readiness, patience_s, limits.max_wait_s, accepted=accepted)
            while True:
                run = self._run(request, output, pictures, retries)
                try:
                    with self.meter.charged(run), self._unwrapped(model):
                        async with aclosing(run.events()) as events:
                            async for event in events:
                                if isinstance(event, Media):
                                    run.is_finished, self._job_s[model] = True, event.timings.denoise_s
                                    finish(event.timings)
                                yield event
                    return
                except QueueFullError as refusal:
                    retries.after_refusal(refusal, run.held_s)
                except (JobFailedError, ValueError) as error:  # it would on any gang
                    if run.num_steps_seen or isinstance(error, JobFailedError):  # else the request is wrong
                        REQUEST_FAILURES.labels(model, type(error).__name__).inc()
                    raise
                except RETRYABLE as error:
                    self._leave_gang(model, error)
                    retries.after(error, run.num_steps_seen)
                await asyncio.sleep(RETRY_PAUSE_S)

    def _leave_gang(self, model: str, error: Exception) -> None:
        """Let requests wait for another gang, until Serve's controller knows that this one is broken."""
        if isinstance(error, GangBrokenError) and error.replica:
            leave_replica(self._stages[model].denoiser, error.replica)

    async def load_lora(self, model: str, lora: Lora) -> None:
        """See ``Service.load_lora``. A gang that breaks meanwhile loads it with the first request that needs it."""
        denoiser, answers = self._stages[model].denoiser, list[object]()
        with self._unwrapped(model):
            with suppress(*NOT_REACHED):
                asked = denoiser.broadcast("load_lora", lora)
                answers = await asked.results_async(timeout_s=LOAD_WITHIN_S, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, Exception) and not isinstance(answer, RETRYABLE):
                    raise answer
            if None not in answers:
                await self._load_on_next(model, lora)

    async def _load_on_next(self, model: str, lora: Lora) -> None:
        """Load an adapter on a gang that is there, or comes. It is tried once: the adapter may be what breaks gangs."""
        patience_s = self._patience_s.get(model, RECOVERY_DEADLINE_S)
        try:
            async with asyncio.timeout(patience_s):
                wrong = await self._stages[model].denoiser.load_lora.remote(lora)
        except TimeoutError:
            reason = f"{model}: no gang was there within {patience_s:.0f} s to load the adapter"
            raise ModelUnavailableError(reason) from None
        except RETRYABLE as error:
            logger.warning("a gang broke while it loaded an adapter: %r", error)
            raise ModelUnavailableError(f"{model}: a gang broke while it loaded the adapter") from error
        if wrong is not None:
            raise wrong

    async def remove_lora(self, model: str, lora: Lora) -> None:
        """See ``Service.remove_lora``. A gang that does not hear of it evicts the adapter later."""
        try:
            asked = self._stages[model].denoiser.broadcast("remove_lora", lora)
            await asked.results_async(timeout_s=LOAD_WITHIN_S, return_exceptions=True)
        except NOT_REACHED as error:
            logger.warning("gangs do not release an adapter: %r", error)

    def _run(self, request: MediaRequest, output: Output, pictures: InputPictures, retries: Retries) -> Run:
        """Return the next run of ``request``."""
        return Run(
            stages=self._stages[request.model],
            request=request,
            output=output,
            pictures=pictures,
            exclusive=retries.exclusive,
            wait_s=retries.wait_s,
            accepted=retries.accepted,
            waited_s=retries.waited_s,
            decode_times=self._decode_times[request.model],
        )

    @contextmanager
    def _counted(self, model: str, max_jobs: float) -> Iterator[bool]:
        """Count a request until the block ends. Yield whether it waits for a gang, which then must take it.

        QueueFullError where there is none, and as many wait for it as it takes.
        """
        is_bare, num_open = self._readiness.is_bare(model), self._num_open[model]
        if is_bare and num_open >= max_jobs:
            raise QueueFullError(num_open, self.retry_after_s(model) + self._job_s.get(model, 0.0))
        self._num_open[model] += 1
        try:
            yield is_bare
        finally:
            self._num_open[model] -= 1

    @contextmanager
    def _unwrapped(self, model: str) -> Iterator[None]:
        """Raise a deployment's own exception in place of Ray's wrapper, whose text is a coloured traceback.

        If a deployment is missing, the error has the predicted time until it is back.
        """
        try:
            yield
        except ray_errors.RayTaskError as error:
            raise error.cause from error
        except DeploymentUnavailableError as error:
            raise ModelUnavailableError(error.message, self.retry_after_s(model)) from error
        except ModelUnavailableError as error:
            raise ModelUnavailableError(error.reason, max(error.retry_after_s, self.retry_after_s(model))) from error
