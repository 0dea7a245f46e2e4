"""From request to media through the Serve deployments; run again if a gang breaks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import MappingProxyType

from ray import exceptions as ray_errors
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.accounts.interface import Accounts
from deployments.accounts.own import OwnAccounts
from deployments.observability.metrics import observe_failure
from deployments.stages.decode_times import DecodeTimes
from deployments.studio.interface import STATUS_MAX_AGE_S, ModelCard, ModelUnavailableError, Output, StudioEvent
from deployments.studio.readiness import Readiness
from deployments.studio.retries import RECOVERY_DEADLINE_S, RETRYABLE, Retries
from deployments.studio.run import Run, StageHandles
from deployments.studio.spending import Spending
from engines.core.failures import JobFailedError
from engines.gang.errors import QueueFullError
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.request import MediaRequest

RETRY_PAUSE_S = 0.25
NO_PATIENCE: Mapping[str, float] = MappingProxyType({})


class DeployedStudio:
    """A ``Studio`` of Serve deployments: runs requests for all served models.

    ``patience_s`` is how long requests for a model wait for a replica, where that is not RECOVERY_DEADLINE_S. What
    requests cost that their clients end early goes into ``accounts``, by default into some of its own.
    """

    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        stages: Mapping[str, StageHandles],
        readiness: Readiness,
        patience_s: Mapping[str, float] = NO_PATIENCE,
        accounts: Accounts | None = None,
    ) -> None:
        self._cards, self._stages, self._readiness, self._patience_s = cards, stages, readiness, patience_s
        self.spending = Spending(accounts or OwnAccounts())
        self._decode_times: defaultdict[str, DecodeTimes] = defaultdict(DecodeTimes)

    def cards(self) -> Mapping[str, ModelCard]:
        return self._cards

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """See ``Studio.not_ready``."""
        return await self._readiness.not_ready(max_age_s)

    def retry_after_s(self, model: str) -> float:
        """See ``Studio.retry_after_s``."""
        return self._readiness.retry_after_s(model)

    async def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[StudioEvent]:
        """See ``Studio.perform``."""
        patience_s = self._patience_s.get(request.model, RECOVERY_DEADLINE_S)
        retries = Retries(request, self._readiness, patience_s)
        while True:
            run = Run(
                stages=self._stages[request.model],
                request=request,
                output=output,
                pictures=pictures,
                exclusive=retries.exclusive,
                wait_s=retries.wait_s,
                waited_s=retries.waited_s,
                decode_times=self._decode_times[request.model],
            )
            try:
                with self.spending.charged(run), _unwrapped():
                    async with aclosing(run.events()) as events:
                        async for event in events:
                            yield event
                return
            except QueueFullError as refusal:
                retries.after_refusal(refusal)
            except JobFailedError as error:  # it would on any gang
                observe_failure(request.model, type(error).__name__)
                raise
            except RETRYABLE as error:
                retries.after(error, run.num_steps_seen)
            await asyncio.sleep(RETRY_PAUSE_S)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raises what a deployment raised as it was raised there: the text of Ray's wrapping is a coloured traceback."""
    try:
        yield
    except ray_errors.RayTaskError as error:
        raise error.cause from error
    except DeploymentUnavailableError as error:
        raise ModelUnavailableError(error.message) from error
