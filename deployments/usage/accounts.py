"""The accounts of keys at one replica of the API, and the limits on what they have under way."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import replace
from weakref import WeakValueDictionary

from deployments.clips.clips import Clips
from deployments.clips.storage import UNAVAILABLE
from deployments.observability.metrics import KeyNames
from deployments.usage.keeper import AccountKeeper, AccountsUnavailableError, Keeper
from deployments.usage.ledger import UsageLedger
from deployments.usage.quotas import Account, Balance, KeyLimits, find_limits, recent

RENEW_S = 5.0
"""Time after which the keeper hears again of all that counts, well within ``LEASE_S``."""
SETTLE_AFTER_S = 0.005
"""Delay of a report, so that what a request used and its end are one call."""
RETRY_S = 1.0

logger = logging.getLogger("troupe.accounts")


class Accounts:
    """Accounts of a replica, ``replica``, by the hash of a key ("" if the server needs no keys).

    Keys without limits are counted here alone. For the others, ``keeper`` (by default one in this process) adds up all
    replicas. It is called before a request begins, and is told the end later. ``clock`` gives seconds.
    """

    ledger: UsageLedger | None = None
    """Store of use, if it outlives this process."""

    def __init__(
        self,
        limits: Iterable[KeyLimits] = (),
        keeper: Keeper | None = None,
        replica: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._replica, self._clock = tuple(limits), replica, clock
        self._keeper = keeper or AccountKeeper(self._limits, clock)
        started_at = int(time.time())
        self._accounts: defaultdict[str, Account] = defaultdict(lambda: Account(since=started_at))
        self._names = KeyNames(self.limits_of)
        self._unreported: set[str] = set()
        """Keys with limits whose accounts have changed."""
        self._news = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None

    def limits_of(self, key: str) -> KeyLimits:
        """Return the limits of ``key``."""
        return find_limits(self._limits, key)

    @asynccontextmanager
    async def taken(self, key: str, num: int, num_clips: int = 0) -> AsyncIterator[None]:
        """Hold ``num`` pictures under way for ``key`` inside the block, beside the ``num_clips`` that it has.

        LimitReachedError if it may not have them, AccountsUnavailableError if the keeper does not answer.
        """
        if not self.limits_of(key).is_limited:
            yield
            return
        account, reservation = self._accounts[key], uuid.uuid4().hex
        account.reserved[reservation] = num
        account.pending.add(reservation)
        try:
            statement = account.statement(self._clock())
            refusal = await self._keeper.reserve(self._replica, key, statement, reservation, num_clips)
            if refusal is not None:
                raise refusal
            account.pending.discard(reservation)
            self._report_soon()
            yield
        finally:  # the keeper may have granted it, and the answer be lost
            del account.reserved[reservation]
            account.pending.discard(reservation)
            self._report_soon(key)

    def charge(self, key: str, model: str, gpu_s: float, *, is_finished: bool = True) -> None:
        """Count a finished picture or clip, or what one has used that ended before by its client's doing."""
        self._accounts[key].charge(gpu_s, self._clock(), is_finished=is_finished)
        if self.ledger is not None:
            self.ledger.note(key, gpu_s, is_finished=is_finished)
        self._names.observe_gpu_seconds(model, key, gpu_s)
        if self.limits_of(key).is_limited:
            self._report_soon(key)

    async def used(self, key: str) -> Balance:
        """Return what ``key`` has used: with a ledger through all replicas, since the database is there."""
        account = self._accounts[key]
        if self.limits_of(key).is_limited:
            balance = (await self._keeper.report(self._replica, {key: account.statement(self._clock())}))[key]
        else:
            balance = Balance.of([account], self._clock())
        stored = None if self.ledger is None else await self.ledger.used(key)
        return balance if stored is None else replace(stored, last_minute_s=balance.last_minute_s)

    def _report_soon(self, *keys: str) -> None:
        """Report the accounts of ``keys``, and all that count for as long as there are any."""
        self._unreported.update(keys)
        if keys:
            self._news.set()
        if self._reporting is None or self._reporting.done():
            # In a context of its own: with a request, Serve cancels the calls that were made in the request's.
            self._reporting = asyncio.get_running_loop().create_task(self._report(), context=Context())

    async def _report(self) -> None:
        """Report changes as they come, and everything each ``RENEW_S``, until there is nothing more to report."""
        renewed_s = time.monotonic()
        while self._unreported or next(self._counting(), None) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(renewed_s + RENEW_S - time.monotonic()):
                    await self._news.wait()
            await asyncio.sleep(SETTLE_AFTER_S)
            self._news.clear()
            if time.monotonic() >= renewed_s + RENEW_S:
                self._unreported.update(self._counting())
                renewed_s = time.monotonic()
            keys, self._unreported = self._unreported, set()
            statements = {key: self._accounts[key].statement(self._clock()) for key in keys}
            try:
                await self._keeper.report(self._replica, statements)
            except Exception as error:  # what was not reported counts as under way for ever
                is_expected = isinstance(error, AccountsUnavailableError)
                logger.warning("what keys have used cannot be reported: %s", error, exc_info=not is_expected)
                self._unreported |= keys
                self._news.set()
                await asyncio.sleep(RETRY_S)

    def _counting(self) -> Iterator[str]:
        """Yield the keys with limits that have something under way, or used something in the last minute."""
        now_s = self._clock()
        for key, account in self._accounts.items():
            if (account.reserved or recent(account.charges, now_s)) and self.limits_of(key).is_limited:
                yield key


class KeyLimitGuard:
    """Lets a key have as much under way as it may, and refuses the rest with LimitReachedError.

    Pictures have accounts; clips are counted by the database, from their request to their end, whichever replica makes
    them.
    """

    def __init__(self, accounts: Accounts, clips: Clips) -> None:
        self._accounts, self._clips = accounts, clips
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by key, while one of its clips is being queued."""

    @asynccontextmanager
    async def taken(self, key: str, num: int = 1) -> AsyncIterator[None]:
        """Hold ``num`` pictures of ``key`` under way inside the block."""
        async with self._accounts.taken(key, num, await self._num_clips(key)):
            yield

    @asynccontextmanager
    async def clip(self, key: str) -> AsyncIterator[None]:
        """Let ``key`` queue a clip inside the block, where it counts as a picture until the database has it.

        Clips of one key are queued one after the other, so that the second of two finds the first counted.
        """
        async with self._lock(key), self.taken(key):
            yield

    def _lock(self, key: str) -> AbstractAsyncContextManager[object]:
        is_counted = self._accounts.limits_of(key).max_concurrent is not None
        return self._locks.setdefault(key, asyncio.Lock()) if is_counted else nullcontext()

    async def _num_clips(self, key: str) -> int:
        """Return how many clips of ``key`` wait or are made. Without the database, none: pictures go on."""
        if self._accounts.limits_of(key).max_concurrent is None:
            return 0
        try:
            return await self._clips.num_open(key)
        except UNAVAILABLE as error:
            logger.warning("clips cannot be counted, and do not count: %s", error)
            return 0
