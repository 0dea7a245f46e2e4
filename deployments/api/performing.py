"""Several pictures at once: their events as one stream, and nothing left running behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from deployments.api.errors import from_failure
from deployments.asyncio_tools import cancel, next_or_none
from deployments.studio.interface import Media, Output, Studio, StudioEvent
from pipelines.request import MediaRequest

T = TypeVar("T")

Indexed = tuple[int, StudioEvent]


async def perform_all(
    studio: Studio, requests: Sequence[MediaRequest], output: Output
) -> AsyncGenerator[Indexed, None]:
    """Events of all ``requests``, run concurrently, each with the index of its request.

    Closing this closes every ``perform``, and so does the first one that fails: what it raised is raised here, as an
    ApiError if it has a meaning for clients.
    """
    # A picture's pump puts an exception when it fails, None when it ends: the queue alone says what happened.
    feed: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(maxsize=16)

    async def pump(index: int, request: MediaRequest) -> None:
        try:
            async with aclosing(studio.perform(request, output)) as events:
                async for event in events:
                    await feed.put((index, event))
        except Exception as failure:
            await feed.put(failure)
        else:
            await feed.put(None)

    pumps = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    num_running = len(pumps)
    try:
        while num_running:
            item = await feed.get()
            if isinstance(item, Exception):
                raise from_failure(item) or item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        await cancel(*pumps)


async def collect(events: AsyncGenerator[Indexed], num_media: int) -> list[Media]:
    """The finished media of ``perform_all``, in the order of the requests."""
    media: dict[int, Media] = {}
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Media):
                media[index] = event
    assert len(media) == num_media, f"{num_media} requests gave {len(media)} media"
    return [media[index] for index in range(num_media)]


async def with_idle(events: AsyncGenerator[T], first_wait_s: float, wait_s: float) -> AsyncGenerator[T | None, None]:
    """``events``, with a None whenever nothing came for ``wait_s`` (before the first event: ``first_wait_s``)."""
    async with aclosing(events):
        timeout_s = first_wait_s
        coming = asyncio.ensure_future(next_or_none(events))
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=timeout_s)
                timeout_s = wait_s
                if not done:
                    yield None
                    continue
                event = coming.result()
                if event is None:
                    return
                yield event
                coming = asyncio.ensure_future(next_or_none(events))
        finally:
            await cancel(coming)
