"""Accounts that all replicas of the API share, as one of them sees them: a call to the keeper begins a request."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

from deployments.usage.interface import (
    AccountsUnavailableError,
    Balance,
    Keeper,
    Refusal,
    Reservation,
    Spent,
    UnknownHolder,
)
from deployments.usage.own import OwnAccounts
from deployments.usage.quotas import KeyLimits, LimitReachedError

RENEW_S = 5.0
SETTLE_AFTER_S = 0.005
"""So that the end of a request, and what it used, are one call."""
RETRY_S = 1.0

logger = logging.getLogger("troupe.accounts")


class SharedAccounts:
    """``Accounts`` for one replica, called ``holder``, of several that have one ``keeper``.

    A request of a key with limits waits for one call; its end is told afterwards, several together. Of a key without,
    the keeper hears nothing, and ``used`` is what went through this replica.
    """

    is_shared = True

    def __init__(
        self,
        limits: Iterable[KeyLimits],
        keeper: Keeper,
        holder: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = OwnAccounts(limits, clock)
        self._keeper, self._holder = keeper, holder
        self._under_way: dict[str, Reservation] = {}
        self._asked: set[str] = set()
        self._ended: list[str] = []
        self._uses: defaultdict[str, list[Spent]] = defaultdict(list)
        self._telling = asyncio.Lock()  # what is on its way to one keeper is not to be told to its successor as well
        self._settling: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def limits_of(self, key: str) -> KeyLimits:
        """See ``Accounts``."""
        return self._own.limits_of(key)

    @asynccontextmanager
    async def taken(self, key: str, num: int, num_clips: int = 0) -> AsyncIterator[None]:
        """See ``Accounts``."""
        if not self.limits_of(key).is_limited:
            yield
            return
        held = Reservation(id=uuid.uuid4().hex, holder=self._holder, key=key, num=num, num_clips=num_clips)
        await self._reserve(held)
        self._under_way[held.id] = held
        if self._renewing is None or self._renewing.done():
            self._renewing = _in_background(self._renew_often())
        try:
            yield
        finally:
            del self._under_way[held.id]
            self._end(held)

    def note(self, key: str, model: str, gpu_s: float, *, is_finished: bool = True) -> None:
        """See ``Accounts``."""
        self._own.note(key, model, gpu_s, is_finished=is_finished)
        if self.limits_of(key).is_limited:
            self._uses[key].append((gpu_s, int(is_finished)))
            self._settle_soon()

    async def used(self, key: str) -> Balance:
        """See ``Accounts``."""
        return await (self._keeper if self.limits_of(key).is_limited else self._own).used(key)

    async def _reserve(self, wanted: Reservation) -> None:
        self._asked.add(wanted.id)
        try:
            answer = await self._keeper.reserve(wanted)
            if isinstance(answer, UnknownHolder):
                await self._renew()
                answer = await self._keeper.reserve(wanted)
            if isinstance(answer, UnknownHolder):
                raise AccountsUnavailableError("the accounts of keys were lost twice in a moment")
        except BaseException:  # it may have been taken, and the answer lost
            self._end(wanted)
            raise
        finally:
            self._asked.discard(wanted.id)
        _raise(answer)

    async def _renew(self) -> None:
        async with self._telling:
            await self._tell_all()

    async def _tell_all(self) -> None:
        """Says all that is under way. A new keeper hears what was used as well, and must not be told twice."""
        under_way, untold = list(self._under_way.values()), self._uses
        self._uses = defaultdict(list)
        is_new = False
        try:
            is_new = await self._keeper.renew(self._holder, under_way, list(self._asked), self._own.quotas.latest())
        finally:
            if not is_new:
                self._tell_again(untold)

    def _end(self, reservation: Reservation) -> None:
        self._ended.append(reservation.id)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._settling is None or self._settling.done():
            self._settling = _in_background(self._settle())

    async def _settle(self) -> None:
        """Tells the keeper what has ended, until there is no more. It is told until it hears."""
        await asyncio.sleep(SETTLE_AFTER_S)
        while self._ended or self._uses:
            try:
                async with self._telling:
                    await self._tell_news()
            except AccountsUnavailableError as error:
                logger.warning("what keys have used could not be told: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _tell_news(self) -> None:
        ended, uses = self._ended, self._uses
        self._ended, self._uses = [], defaultdict(list)
        try:
            if await self._keeper.settle(self._holder, ended, uses) is not None:
                await self._tell_all()
        except AccountsUnavailableError:
            self._ended = ended + self._ended
            self._tell_again(uses)
            raise

    def _tell_again(self, uses: Mapping[str, Sequence[Spent]]) -> None:
        for key, all_spent in uses.items():
            self._uses[key] += all_spent
            self._settle_soon()

    async def _renew_often(self) -> None:
        while self._under_way:
            await asyncio.sleep(RENEW_S)
            try:
                await self._renew()
            except AccountsUnavailableError as error:
                logger.warning("what keys have under way could not be told: %s", error)


def _in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """In a context of its own: with a request Serve cancels the calls that were made in the request's."""
    return asyncio.get_running_loop().create_task(work, context=Context())


def _raise(answer: Refusal | None) -> None:
    if answer is not None:
        raise LimitReachedError(answer.reason, answer.retry_after_s)
