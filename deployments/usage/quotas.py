"""Limits of API keys, and the account of what one key uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from deployments.usage.api_keys import EVERYBODY, check_key_start, entry_of
from pipelines.wording import counted

MINUTE_S = 60.0

Charge = tuple[float, float]
"""Time of a charge, and its GPU-seconds."""


class LimitReachedError(Exception):
    """A key has as much under way, or has used as much, as it may. After ``retry_after_s`` it may be allowed more."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits of an API key. ValueError for an invalid one."""

    key: str = EVERYBODY
    """The key's SHA-256 in hexadecimal digits, or its first eight or more. "*" is every key without an entry."""
    name: str = ""
    """The key's name in metrics."""
    weight: float = 1.0
    """The key's share beside others, with the policy ``fair``."""
    max_concurrent: int | None = None
    """Number of pictures and clips that may be under way."""
    gpu_seconds_per_minute: float | None = None
    """GPU-seconds of the last minute at which the next request is refused."""

    def __post_init__(self) -> None:
        check_key_start("key", self.key)
        for name in ("weight", "max_concurrent", "gpu_seconds_per_minute"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # refuses NaN as well
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.name and self.key == EVERYBODY:
            raise ValueError(f"name is {self.name!r}; * is many keys, so leave the name out")

    @property
    def is_limited(self) -> bool:
        """True if the quota may refuse a request."""
        return self.max_concurrent is not None or self.gpu_seconds_per_minute is not None

    def check_open(self, num_open: int, num: int) -> None:
        """Raise LimitReachedError if ``num`` more may not be under way beside ``num_open`` pictures and clips."""
        if self.max_concurrent is not None and num_open + num > self.max_concurrent:
            under_way = counted(num_open, "picture or clip", "pictures and clips")
            raise LimitReachedError(f"{under_way} of this key under way; the limit is {self.max_concurrent}", 1.0)

    def check_minute(self, charges: Iterable[Charge], now_s: float) -> None:
        """Raise LimitReachedError if the ``charges`` of the last minute use it up, with the time until they do not."""
        charges, allowed_s = sorted(recent(charges, now_s)), self.gpu_seconds_per_minute
        left_s = used_s = sum(gpu_s for _, gpu_s in charges)
        if allowed_s is None or used_s < allowed_s:
            return
        message = f"this key has used {used_s:.1f} GPU-seconds in the last minute, and {allowed_s:g} may be"
        for at_s, gpu_s in charges:
            left_s -= gpu_s
            if left_s < allowed_s:
                raise LimitReachedError(message, at_s + MINUTE_S - now_s)


NO_LIMITS = KeyLimits()


def find_limits(limits: Sequence[KeyLimits], key: str) -> KeyLimits:
    """Return the entry of ``key`` (a hash, "" where keys are not asked for), or else that of every key."""
    return entry_of(limits, key) or NO_LIMITS


def recent(charges: Iterable[Charge], now_s: float) -> list[Charge]:
    """Return the ``charges`` of the last minute."""
    return [charge for charge in charges if charge[0] > now_s - MINUTE_S]


@dataclass(kw_only=True, slots=True)
class Account:
    """Use of one key through one replica of the API. Times are of one process's clock, in seconds."""

    since: int
    """Unix time since when is counted."""
    version: int = 0
    """Number of the newest statement about it."""
    num_requests: int = 0
    """Finished pictures and clips."""
    gpu_s: float = 0.0
    """GPU-seconds of all charges."""
    charges: list[Charge] = field(default_factory=list)
    """Charges of the last minute."""
    reserved: dict[str, int] = field(default_factory=dict)
    """Number of pictures under way, or asked for, by the id of the reservation."""
    pending: set[str] = field(default_factory=set)
    """Ids of reservations that are asked for, and not granted yet."""

    @property
    def num_open(self) -> int:
        """Number of pictures in granted reservations."""
        return sum(num for reservation, num in self.reserved.items() if reservation not in self.pending)

    def charge(self, gpu_s: float, now_s: float, *, is_finished: bool) -> None:
        """Add GPU-seconds of a request, and the request itself if ``is_finished``."""
        self.num_requests += is_finished
        self.gpu_s += gpu_s
        self.charges = [*recent(self.charges, now_s), (now_s, gpu_s)]

    def statement(self, now_s: float) -> Account:
        """Return a copy for another process, with a new version and times relative to ``now_s``."""
        self.version, self.charges = self.version + 1, recent(self.charges, now_s)
        return self.shifted(-now_s)

    def shifted(self, by_s: float) -> Account:
        """Return a copy with all times ``by_s`` later."""
        charges = [(at_s + by_s, gpu_s) for at_s, gpu_s in self.charges]
        return replace(self, charges=charges, reserved=dict(self.reserved), pending=set(self.pending))


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Use of a key through all replicas of the API."""

    since: int
    """Unix time since when is counted."""
    num_requests: int
    """Finished pictures and clips."""
    gpu_s: float
    """GPU-seconds of these, and of those that its client ended or failed by."""
    last_minute_s: float = 0.0
    """GPU-seconds of the last minute."""

    def __add__(self, other: Balance) -> Balance:
        return Balance(
            since=min(self.since, other.since),
            num_requests=self.num_requests + other.num_requests,
            gpu_s=self.gpu_s + other.gpu_s,
            last_minute_s=self.last_minute_s + other.last_minute_s,
        )

    @classmethod
    def of(cls, accounts: Collection[Account], now_s: float) -> Balance:
        """Return the sum of ``accounts``, of which there is one at least."""
        return cls(
            since=min(account.since for account in accounts),
            num_requests=sum(account.num_requests for account in accounts),
            gpu_s=sum(account.gpu_s for account in accounts),
            last_minute_s=sum(gpu_s for account in accounts for _, gpu_s in recent(account.charges, now_s)),
        )
