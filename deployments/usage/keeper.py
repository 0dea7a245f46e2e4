"""The keeper: the one process that knows what keys use through all replicas of the API, and grants reservations.

It is free of Ray, as what imports it is loaded before workers are forked.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from deployments.usage.quotas import MINUTE_S, Account, Balance, KeyLimits, LimitReachedError, find_limits

LEASE_S = 15.0
"""A replica that was silent for this long is gone, and its reservations have ended."""
GRACE_S = 0.25
"""Time that a reservation waits for others to end.

A client's next request may reach another replica. It may come to the keeper before the report of the last one's end,
which is sent in the background."""


class AccountsUnavailableError(Exception):
    """The keeper does not answer, so a key with limits gets nothing. ``retry_after_s`` says when to try again."""

    retry_after_s = 2.0


class Keeper(Protocol):
    """Adds up the accounts of all replicas.

    Each call carries complete accounts (``Account.statement``), so it may be repeated, lost or late: the newest counts.
    A new keeper needs nothing else.
    """

    async def report(self, replica: str, accounts: Mapping[str, Account]) -> Mapping[str, Balance]:
        """Take the ``accounts`` of a replica, by key. Return what all replicas count for these keys."""
        ...

    async def reserve(
        self, replica: str, key: str, account: Account, reservation: str, num_clips: int
    ) -> LimitReachedError | None:
        """Grant a pending reservation of ``account``, beside ``num_clips`` that the key has. Return a refusal."""
        ...


class AccountKeeper:
    """A ``Keeper`` in this process, whose calls are in one event loop. ``clock`` gives seconds."""

    def __init__(self, limits: Iterable[KeyLimits] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = tuple(limits), clock
        self._accounts: defaultdict[str, dict[str, Account]] = defaultdict(dict)
        """Accounts by key and replica. The use of replicas that are gone still counts, for a minute."""
        self._heard_s: dict[str, float] = {}
        """Time of the last call, by replica."""
        self._reported = asyncio.Event()

    async def report(self, replica: str, accounts: Mapping[str, Account]) -> Mapping[str, Balance]:
        """See ``Keeper``."""
        now_s = self._heard_s[replica] = self._clock()
        self._forget([one for one, heard_s in self._heard_s.items() if heard_s < now_s - LEASE_S - MINUTE_S])
        for key, account in accounts.items():
            known = self._accounts[key].get(replica)
            if known is None or known.version < account.version:
                granted = set() if known is None else known.reserved.keys() - known.pending
                self._accounts[key][replica] = account = account.shifted(now_s)
                account.pending -= granted
        self._reported.set()
        return {key: Balance.of(self._accounts[key].values(), now_s) for key in accounts}

    async def reserve(
        self, replica: str, key: str, account: Account, reservation: str, num_clips: int
    ) -> LimitReachedError | None:
        """See ``Keeper``."""
        await self.report(replica, {key: account})
        charges = [charge for account in self._accounts[key].values() for charge in account.charges]
        try:
            find_limits(self._limits, key).check_minute(charges, self._clock())
            await self._grant(replica, key, reservation, num_clips)
        except LimitReachedError as refusal:
            return refusal
        return None

    async def _grant(self, replica: str, key: str, reservation: str, num_clips: int) -> None:
        """Grant it once there is room. LimitReachedError if there is none soon, or if it was withdrawn meanwhile."""
        limits, give_up_s = find_limits(self._limits, key), time.monotonic() + GRACE_S
        while reservation in (account := self._accounts[key][replica]).pending:
            try:
                limits.check_open(self._num_open(key) + num_clips, account.reserved[reservation])
                account.pending.discard(reservation)
            except LimitReachedError:
                if not await self._is_reported_within(give_up_s - time.monotonic()):
                    raise
        if reservation not in account.reserved:
            raise LimitReachedError("this request ended before there was room for it", 1.0)

    async def _is_reported_within(self, timeout_s: float) -> bool:
        self._reported.clear()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._reported.wait()
        except TimeoutError:
            return False

    def _forget(self, replicas: Iterable[str]) -> None:
        """Forget silent ``replicas``: nothing of theirs counts. One that comes back says all again."""
        for replica in replicas:
            del self._heard_s[replica]
            for accounts in self._accounts.values():
                accounts.pop(replica, None)

    def _num_open(self, key: str) -> int:
        alive_s = self._clock() - LEASE_S
        return sum(one.num_open for replica, one in self._accounts[key].items() if self._heard_s[replica] >= alive_s)
