"""Limits of keys on what is under way: pictures, which have accounts, and clips, which the database does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from typing import TypeVar
from weakref import WeakValueDictionary

from deployments.clips.clips import Clips
from deployments.clips.storage import DATABASE_FAILURES, StorageFullError, StorageLostError
from deployments.usage.interface import Accounts

T = TypeVar("T")

logger = logging.getLogger("troupe.api")


class KeyLimitGuard:
    """Lets in what a key may have under way, and refuses the rest with LimitReachedError.

    A clip counts from its request to its end, whichever replica makes it. Requests of one key are looked at one after
    the other, so that of two that come at once the second finds the first counted; where replicas share the accounts,
    who keeps them does that for pictures.
    """

    def __init__(self, accounts: Accounts, clips: Clips) -> None:
        self._accounts, self._clips = accounts, clips
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By key, for as long as somebody of it has the turn or waits for it."""

    async def pictures(self, key: str, num: int, events: AsyncGenerator[T]) -> AsyncGenerator[T, None]:
        """Yields ``events``, which make ``num`` pictures, if the key may have them."""
        async with aclosing(events), AsyncExitStack() as stack:
            async with nullcontext() if self._accounts.is_shared else self._turn(key):
                await stack.enter_async_context(self._accounts.taken(key, num, await self._num_clips(key)))
            async for event in events:
                yield event

    @asynccontextmanager
    async def clip(self, key: str) -> AsyncIterator[None]:
        """Inside the block the key may queue a clip, which counts as a picture until the database has it."""
        async with self._turn(key), self._accounts.taken(key, 1, await self._num_clips(key)):
            yield

    def _turn(self, key: str) -> AbstractAsyncContextManager[object]:
        if self._accounts.limits_of(key).max_concurrent is None:
            return nullcontext()
        return self._turns.setdefault(key, asyncio.Lock())

    async def _num_clips(self, key: str) -> int:
        """Returns how many clips of the key wait or are made. Without the database none are, and pictures go on."""
        if self._accounts.limits_of(key).max_concurrent is None:
            return 0
        try:
            return await self._clips.num_open(key)
        except (*DATABASE_FAILURES, StorageFullError, StorageLostError) as error:
            logger.warning("clips cannot be counted, and do not count: %s", error)
            return 0
