"""Tasks and streams that end cleanly: what was started is over when the block is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EndedError(Exception):
    """Work was cancelled because what it depends on is gone."""


async def unless(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, None]) -> T:
    """What ``work`` returns; if ``end`` returns first, ``work`` is cancelled and EndedError raised.

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
    """Cancel ``tasks`` and wait until they are over, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def next_or_none(events: AsyncIterator[T]) -> T | None:
    return await anext(events, None)
