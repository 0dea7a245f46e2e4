"""The server-sent events of a streamed image request."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing

from deployments.api.answers import CompletedImage, PartialImage, StageTimes, StepProgress
from deployments.api.event_stream import Event
from deployments.api.performing import Indexed
from deployments.requests.images import ImagePlan
from deployments.studio.interface import Media, Preview, StudioEvent


async def image_events(plan: ImagePlan, events: AsyncGenerator[Indexed]) -> AsyncGenerator[Event, None]:
    """What the client of ``plan`` is told: previews, finished pictures and, if wanted, every step."""
    async with aclosing(events):
        async for index, event in events:
            if told := translate(plan, index, event):
                yield told


def translate(plan: ImagePlan, index: int, event: StudioEvent) -> Event | None:
    match event:
        case Media():
            return _completed(plan, index, event)
        case Preview():
            return _partial(plan, index, event)
        case _ if plan.stream_progress:
            return StepProgress(image_index=index, step=event.step, of=event.num_steps, eta_s=event.eta_s)
    return None


def _completed(plan: ImagePlan, index: int, media: Media) -> CompletedImage:
    return CompletedImage(
        b64_json=b64encode(media.data).decode(),
        created_at=int(time.time()),
        output_format=media.format,
        size=plan.size,
        safety_identifier=plan.safety_identifier,
        image_index=index,
        seed=media.seed,
        timings=StageTimes.of(media.timings),
    )


def _partial(plan: ImagePlan, index: int, preview: Preview) -> PartialImage:
    return PartialImage(
        b64_json=b64encode(preview.data).decode(),
        partial_image_index=preview.index,
        created_at=int(time.time()),
        size=plan.size,
        image_index=index,
        step=preview.step,
    )
