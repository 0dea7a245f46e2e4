"""Tasks and streams that end cleanly: what was started is over when the block is.

Task groups do not do here: one may not span the ``yield`` of an async generator, whose consumer it would cancel for a
failure inside, and who may go on with it in another task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

from anyio import CancelScope

T = TypeVar("T")


class EndedError(Exception):
    """Work was cancelled because what it depends on is gone."""


class OneThread(Generic[T]):
    """A call that blocks, maybe for ever: one thread waits for it at most, however many ask."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._asked: asyncio.Future[T] | None = None

    async def answer(self, within_s: float) -> T:
        """Return what the call that is under way does, or a new one. TimeoutError if that takes longer."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._call))
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self._asked)


async def unless(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, None]) -> T:
    """Return what ``work`` does; if ``end`` returns first, ``work`` is cancelled and EndedError raised.

    Cancelling this call cancels both.
    """
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        ending.result()
        raise EndedError
    finally:
        await cancel(working, ending)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and waits until they are over, whatever they end with."""
    for task in tasks:
        task.cancel()
    with CancelScope(shield=True):  # a response's task group cancels its task not once, but until it is over
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` does, however often this call is cancelled meanwhile: for cleaning up after that.

    Who cancels a request may do it again and again, until its task is over.
    """
    working = asyncio.ensure_future(work)
    with CancelScope(shield=True):
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((working,))
    return working.result()


async def merge(*sources: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Yield the items of all ``sources``, which run side by side, as they come. No source waits for the consumer.

    What the first source that fails raises is raised here. At the end, whatever it is, all sources are closed.
    """
    feed: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    feed.put_nowait((item,))
        except BaseException as failure:  # a cancellation inside the source, too: nobody is to wait for it for ever
            end = failure
        feed.put_nowait(end)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_running = len(pumps)
        while num_running:
            match await feed.get():
                case (item,):
                    yield item
                case None:
                    num_running -= 1
                case BaseException() as failure:
                    raise failure
    finally:
        await cancel(*pumps)


async def with_idle(events: AsyncGenerator[T], first_wait_s: float, wait_s: float) -> AsyncGenerator[T | None]:
    """Yield ``events``, and a None whenever nothing came for ``wait_s`` (before the first event: ``first_wait_s``)."""
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


async def next_or_none(events: AsyncIterator[T]) -> T | None:
    """Return the next event, or None after the last."""
    return await anext(events, None)
