"""The seam between who asks what a key may have, and who keeps its account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from deployments.usage.quotas import KeyLimits, Use

Spent = tuple[float, int]
"""GPU-seconds, and how many requests they finished: 1, or 0 where one ended before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What a key has used ``since`` a Unix time: finished requests, GPU-seconds of these and of those that ended before
    by its doing, and how many of them in the last minute."""

    since: int
    num_requests: int
    gpu_s: float
    last_minute_s: float


class AccountsUnavailableError(Exception):
    """Nobody says what a key with limits may have. ``retry_after_s`` is when that may be otherwise."""

    retry_after_s = 2.0


class Accounts(Protocol):
    """Accounts by the hash of a key ("" where none is asked for)."""

    def limits_of(self, key: str) -> KeyLimits: ...

    @property
    def is_shared(self) -> bool:
        """Whether other replicas have the same."""
        ...

    def taken(self, key: str, num: int, num_clips: int = 0) -> AbstractAsyncContextManager[None]:
        """Holds ``num`` pictures under way for the key inside the block, beside ``num_clips`` that it has as well.

        LimitReachedError if it may not have them, AccountsUnavailableError if nobody knows.
        """
        ...

    def note(self, key: str, model: str, gpu_s: float, *, is_finished: bool = True) -> None:
        """Counts a finished picture or clip, or what was used for one that ended before by its key's doing."""
        ...

    async def used(self, key: str) -> Balance: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """``num`` pictures of ``key`` that ``holder``, a replica of the API, has under way or is about to begin.

    The key had ``num_clips`` under way then.
    """

    id: str
    holder: str
    key: str
    num: int
    num_clips: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a key may not have something, and when to ask again."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownHolder:
    """The keeper has not heard of this holder yet, as a new one has of none: it wants ``Keeper.renew`` first."""


class Keeper(Protocol):
    """Keeps the accounts of all holders."""

    async def reserve(self, asked: Reservation) -> Refusal | UnknownHolder | None:
        """Takes what is asked, None says; to ask again with the same id takes it once."""
        ...

    async def settle(
        self, holder: str, ended: Sequence[str], uses: Mapping[str, Sequence[Spent]]
    ) -> UnknownHolder | None:
        """Ends reservations by their ids, and counts what was used, by key."""
        ...

    async def renew(
        self, holder: str, under_way: Sequence[Reservation], asked: Sequence[str], latest: Mapping[str, Sequence[Use]]
    ) -> bool:
        """Says that the holder lives, and all that it has under way; ``asked`` are ids of what it waits to hear about.

        ``latest`` is what it counted in the last minute, for a keeper that hears of it for the first time: True.
        """
        ...

    async def used(self, key: str) -> Balance: ...
