"""Tasks and streams that end with their block.

Task groups must not span the ``yield`` of an async generator. A failure inside would cancel the consumer, and the
consumer may resume the generator in another task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
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


def is_cancelled() -> bool:
    """Return whether the current task was cancelled: what ran ``to_the_end`` has not raised it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, even if this call is cancelled, once or repeatedly: for clean-up."""
    working = asyncio.ensure_future(work)
    with CancelScope(shield=True):
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((working,))
    return working.result()


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is not cut short.

    If this call is cancelled meanwhile, raise CancelledError afterwards, even if ``work`` fails. A caller that loops on
    errors would never end otherwise.
    """
    task = asyncio.current_task()
    num_before = 0 if task is None else task.cancelling()
    try:
        return await to_the_end(work)
    finally:
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError


async def taken(take: Coroutine[Any, Any, T | None], give_back: Callable[[T], Coroutine[Any, Any, None]]) -> T | None:
    """Return the result of ``take``. If this call is cancelled meanwhile, hand it to ``give_back``.

    CancelledError is raised then, also if one of them fails.
    """
    try:
        found = await to_the_end(take)
        if found is not None and is_cancelled():
            await to_the_end(give_back(found))
        return found
    finally:
        if is_cancelled():
            raise asyncio.CancelledError


async def produced(produce: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> AsyncGenerator[T]:
    """Yield what ``produce`` hands to its argument. It runs in a task, which does not wait for the consumer.

    Its failure is raised after the items before it. At the end, whatever it is, the task is cancelled and awaited.
    """
    feed: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    task = asyncio.ensure_future(produce(lambda item: feed.put_nowait((item,))))
    task.add_done_callback(lambda _: feed.put_nowait(None))
    try:
        while (entry := await feed.get()) is not None:
            yield entry[0]
        task.result()
    finally:
        await cancel(task)


def merge(*sources: AsyncGenerator[T]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all ``sources``, each with the index of its source, as they come.

    The sources run side by side and do not wait for the consumer. The first failure is raised. At the end, whatever it
    is, all sources are closed.
    """

    async def pump(index: int, source: AsyncGenerator[T], put: Callable[[tuple[int, T]], None]) -> None:
        async with aclosing(source):
            async for item in source:
                put((index, item))

    async def pump_all(put: Callable[[tuple[int, T]], None]) -> None:
        pumps = [asyncio.ensure_future(pump(index, source, put)) for index, source in enumerate(sources)]
        try:
            await asyncio.gather(*pumps)
        finally:
            await cancel(*pumps)

    return produced(pump_all)


class IdleError(Exception):
    """No item came in time."""


class Upcoming(Generic[T]):
    """The items of an async generator, each waited for with a timeout that does not cancel it."""

    def __init__(self, items: AsyncGenerator[T]) -> None:
        self._items = items
        self._next: asyncio.Future[T | None] | None = None

    async def next(self, within_s: float) -> T | None:
        """Return the next item, None after the last. IdleError if it takes longer: the next call waits on for it."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._items, None))
        await asyncio.wait((self._next,), timeout=within_s)
        if not self._next.done():
            raise IdleError
        item, self._next = self._next, None
        return item.result()

    async def aclose(self) -> None:
        """Cancel the item that is waited for, and close the generator."""
        if self._next is not None:
            await cancel(self._next)
        await self._items.aclose()
