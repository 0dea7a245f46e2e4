"""Who keeps account for all replicas of the API: one process, asked once by each request of a key with limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from deployments.usage.interface import Balance, Refusal, Reservation, Spent, UnknownHolder
from deployments.usage.quotas import KeyLimits, LimitReachedError, Quotas, Use

LEASE_S = 15.0
"""A holder that was not heard of for so long is gone, and what it had under way with it."""
GRACE_S = 0.25
"""So long a reservation waits for others to end. Who asks one after the other may meet another replica each time, and
the end of the first request, which no answer waits for, may come there after the second one."""


class AccountKeeper:
    """A ``Keeper`` in this process, all of whose calls are in one event loop. ``clock`` gives seconds."""

    def __init__(self, limits: Iterable[KeyLimits], clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas = Quotas(limits, clock)
        self._clock = clock
        self._under_way: dict[str, Reservation] = {}
        self._waiting: set[str] = set()
        """Ids of reservations that wait for room, and were not ended meanwhile."""
        self._heard_s: dict[str, float] = {}
        self._ended = asyncio.Event()

    async def reserve(self, asked: Reservation) -> Refusal | UnknownHolder | None:
        """See ``Keeper``."""
        if asked.holder not in self._heard_s:
            return UnknownHolder()
        self._heard_s[asked.holder] = self._clock()
        if asked.id in self._under_way:
            return None
        self._waiting.add(asked.id)
        try:
            self._quotas.check_minute(asked.key)
            await self._take_once_there_is_room(asked)
        except LimitReachedError as refusal:
            return Refusal(reason=refusal.reason, retry_after_s=refusal.retry_after_s)
        finally:
            self._waiting.discard(asked.id)
        return None

    async def settle(
        self, holder: str, ended: Sequence[str], uses: Mapping[str, Sequence[Spent]]
    ) -> UnknownHolder | None:
        """See ``Keeper``."""
        if holder not in self._heard_s:
            return UnknownHolder()
        self._heard_s[holder] = self._clock()
        for reservation_id in ended:
            self._end(reservation_id)
        for key, all_spent in uses.items():
            for gpu_s, num_finished in all_spent:
                self._quotas.note(key, gpu_s, num_finished)
        return None

    async def renew(
        self, holder: str, under_way: Sequence[Reservation], asked: Sequence[str], latest: Mapping[str, Sequence[Use]]
    ) -> bool:
        """See ``Keeper``."""
        is_new = holder not in self._heard_s
        if is_new:
            for key, uses in latest.items():
                self._quotas.restore(key, uses)
        self._heard_s[holder] = self._clock()
        known = {*asked, *(one.id for one in under_way)}
        for reservation in [one for one in self._under_way.values() if one.holder == holder]:
            if reservation.id not in known:
                self._end(reservation.id)
        for reservation in under_way:
            if reservation.id not in self._under_way:
                self._take(reservation)
        return is_new

    async def used(self, key: str) -> Balance:
        """See ``Keeper``."""
        num_requests, gpu_s, last_s = self._quotas.used(key)
        return Balance(since=self._quotas.started_at, num_requests=num_requests, gpu_s=gpu_s, last_minute_s=last_s)

    async def _take_once_there_is_room(self, asked: Reservation) -> None:
        """LimitReachedError if there is none soon, or who asked has ended it meanwhile. Of two calls that ask for the
        same, one takes it."""
        give_up_s = time.monotonic() + GRACE_S
        while asked.id not in self._under_way:
            if asked.id not in self._waiting:
                raise LimitReachedError("this was given back before there was room for it", 1.0)
            self._forget_the_gone()
            try:
                self._quotas.check_open(asked.key, asked.num, asked.num_clips)
            except LimitReachedError:
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise
                await self._next_end(left_s)
            else:
                self._take(asked)

    async def _next_end(self, within_s: float) -> None:
        self._ended.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return

    def _take(self, reservation: Reservation) -> None:
        self._under_way[reservation.id] = reservation
        self._quotas.add_open(reservation.key, reservation.num)

    def _end(self, reservation_id: str) -> None:
        self._waiting.discard(reservation_id)
        reservation = self._under_way.pop(reservation_id, None)
        if reservation is not None:
            self._quotas.add_open(reservation.key, -reservation.num)
            self._ended.set()

    def _forget_the_gone(self) -> None:
        oldest_s = self._clock() - LEASE_S
        for reservation in list(self._under_way.values()):
            if self._heard_s[reservation.holder] < oldest_s:
                self._end(reservation.id)
