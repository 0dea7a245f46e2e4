"""Tasks and streams that end with their block.

Task groups must not span the ``yield`` of an async generator: a failure inside would cancel the consumer, which may
also resume the generator in another task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

from anyio import CancelScope

T = TypeVar("T")


class EndedError(Exception):
    """Work was cancelled because its precondition ended."""


class OneThread(Generic[T]):
    """A call that may block for ever, shared by its callers: at most one thread waits for it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._running: asyncio.Future[T] | None = None

    async def answer(self, within_s: float) -> T:
        """Return the result of the running call, or of a new one. TimeoutError after ``within_s``."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(asyncio.to_thread(self._call))
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self._running)


async def unless(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, None]) -> T:
    """Return the result of ``work``. If ``end`` returns first, cancel ``work`` and raise EndedError.

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
    """Cancel ``tasks`` and wait until they end, with any result."""
    for task in tasks:
        task.cancel()
    with CancelScope(shield=True):  # a response's task group cancels its task repeatedly
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, even if this call is cancelled, once or repeatedly: for clean-up."""
    working = asyncio.ensure_future(work)
    with CancelScope(shield=True):
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((working,))
    return working.result()


async def merge(*sources: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Yield the items of all ``sources``, which run concurrently, as they come. No source waits for the consumer.

    The first exception of a source is raised here. All sources are closed at the end.
    """
    feed: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    feed.put_nowait((item,))
        except BaseException as failure:  # a cancellation too: the consumer must not wait for ever
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
    """Yield ``events``, and None after each ``wait_s`` without one (``first_wait_s`` before the first event)."""
    async with aclosing(events):
        timeout_s = first_wait_s
        pending = asyncio.ensure_future(next_or_none(events))
        try:
            while True:
                done, _ = await asyncio.wait((pending,), timeout=timeout_s)
                timeout_s = wait_s
                if not done:
                    yield None
                    continue
                event = pending.result()
                if event is None:
                    return
                yield event
                pending = asyncio.ensure_future(next_or_none(events))
        finally:
            await cancel(pending)


async def next_or_none(events: AsyncIterator[T]) -> T | None:
    """Return the next event, or None after the last."""
    return await anext(events, None)
