"""A studio that keeps account of what is made for whom."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from deployments.quotas import Quotas
from deployments.studio.interface import STATUS_MAX_AGE_S, Media, ModelCard, Output, Studio, StudioEvent
from pipelines.pictures import NO_PICTURES, InputPictures
from pipelines.request import MediaRequest


class MeteredStudio:
    """A ``Studio`` around another, which tells ``quotas`` what each finished request took. What failed, or was closed
    early, costs its key nothing."""

    def __init__(self, studio: Studio, quotas: Quotas) -> None:
        self._studio, self._quotas = studio, quotas

    def cards(self) -> Mapping[str, ModelCard]:
        return self._studio.cards()

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """See ``Studio.not_ready``."""
        return await self._studio.not_ready(max_age_s)

    def retry_after_s(self, model: str) -> float:
        """See ``Studio.retry_after_s``."""
        return self._studio.retry_after_s(model)

    async def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[StudioEvent]:
        """See ``Studio.perform``."""
        async with aclosing(self._studio.perform(request, output, pictures)) as events:
            async for event in events:
                if isinstance(event, Media):
                    self._quotas.note(request.key, request.model, event.timings.gpu_s)
                yield event
