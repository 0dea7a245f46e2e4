"""A studio that keeps account of what is made for whom."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager

from deployments.observability.metrics import observe_deadline, observe_open, observe_turn
from deployments.studio.interface import (
    STATUS_MAX_AGE_S,
    Media,
    ModelCard,
    Output,
    StageTimes,
    Studio,
    StudioEvent,
)
from deployments.usage.interface import Accounts
from engines.gang.errors import QueueFullError
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.request import MediaRequest


class MeteredStudio:
    """A ``Studio`` around another, which tells ``accounts``, and metrics, what each finished request took. What others
    cost that end before is for who knows what ranks have done: see ``Spending``."""

    def __init__(self, studio: Studio, accounts: Accounts) -> None:
        self._studio, self._accounts = studio, accounts

    def cards(self) -> Mapping[str, ModelCard]:
        return self._studio.cards()

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """See ``Studio.not_ready``."""
        return await self._studio.not_ready(max_age_s)

    def retry_after_s(self, model: str) -> float:
        """See ``Studio.retry_after_s``."""
        return self._studio.retry_after_s(model)

    def may_wait_for(self, model: str) -> bool:
        """See ``Studio.may_wait_for``."""
        return self._studio.may_wait_for(model)

    async def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[StudioEvent]:
        """See ``Studio.perform``."""
        began_s = time.perf_counter()
        with observe_open(request.model, request.service_tier), _deadline_of_failures(request):
            async with aclosing(self._studio.perform(request, output, pictures)) as events:
                async for event in events:
                    if isinstance(event, Media):
                        self._finished(request, event.timings, time.perf_counter() - began_s)
                    yield event

    def _finished(self, request: MediaRequest, timings: StageTimes, took_s: float) -> None:
        self._accounts.note(request.key, request.model, timings.gpu_s)
        observe_turn(request.model, request.service_tier, timings.queue_s, timings.eta_s, timings.total_s)
        if request.deadline_s is not None:
            observe_deadline(request.model, "met" if took_s <= request.deadline_s else "missed")


@contextmanager
def _deadline_of_failures(request: MediaRequest) -> Iterator[None]:
    """Counts the deadline of a request that fails in the block, not of one that is closed."""
    try:
        yield
    except Exception as failure:
        if request.deadline_s is not None:
            observe_deadline(request.model, "refused" if isinstance(failure, QueueFullError) else "failed")
        raise
