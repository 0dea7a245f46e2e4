"""What each API key has used, and how much it may have."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipelines.wording import counted

EVERYBODY = "*"
MINUTE_S = 60.0

Use = tuple[float, float, int]
"""How many seconds ago, how many GPU-seconds, and how many requests they finished: 1, or 0 where one ended before."""


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """``key`` is the SHA-256 of an API key in hexadecimal digits, or eight or more at its beginning; "*" is every key
    that has no entry of its own, each by itself. ``weight``: its share beside others with the policy ``fair``. ``name``
    is what metrics call it.

    ``max_concurrent`` pictures and clips may be under way, and no more begin in a minute after
    ``gpu_seconds_per_minute`` were used in it. ValueError for what cannot be.
    """

    key: str = EVERYBODY
    name: str = ""
    weight: float = 1.0
    max_concurrent: int | None = None
    gpu_seconds_per_minute: float | None = None

    def __post_init__(self) -> None:
        if self.key != EVERYBODY and not re.fullmatch(r"[0-9a-f]{8,64}", self.key):
            allowed = "8 to 64 digits at the beginning of the key's SHA-256 (printf %s KEY | sha256sum), or *"
            raise ValueError(f"key is {self.key!r}; it must be {allowed}")
        for name in ("weight", "max_concurrent", "gpu_seconds_per_minute"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # nor what is no number
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.name and self.key == EVERYBODY:
            raise ValueError(f"name is {self.name!r}; * is many keys, so leave the name out")

    @property
    def is_limited(self) -> bool:
        """Whether anything is ever refused."""
        return self.max_concurrent is not None or self.gpu_seconds_per_minute is not None


NO_LIMITS = KeyLimits()


class LimitReachedError(Exception):
    """A key has as much under way, or has used as much, as it may. ``retry_after_s`` is when that may be otherwise."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason, self.retry_after_s = reason, retry_after_s

    def __str__(self) -> str:
        return self.reason


@dataclass(slots=True)
class _Account:
    num_requests: int = 0
    gpu_s: float = 0.0
    num_open: int = 0
    latest: deque[Use] = field(default_factory=deque)
    """Of the last minute, each with the time when instead of how long ago."""


class Quotas:
    """Accounts by the hash of a key ("" where none is asked for), since ``started_at``. ``clock`` gives seconds."""

    def __init__(self, limits: Iterable[KeyLimits] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = tuple(limits)
        self._clock = clock
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)
        self.started_at = int(time.time())

    def limits_of(self, key: str) -> KeyLimits:
        own = [one for one in self._limits if one.key != EVERYBODY and key.startswith(one.key)]
        others = [one for one in self._limits if one.key == EVERYBODY]
        return next(iter([*own, *others]), NO_LIMITS)

    def note(self, key: str, gpu_s: float, num_finished: int = 1) -> None:
        """Counts a finished picture or clip, or (0) what was used for one that ended before."""
        account = self._accounts[key]
        account.num_requests += num_finished
        account.gpu_s += gpu_s
        account.latest.append((self._clock(), gpu_s, num_finished))
        self._forget_old(account)  # nobody asks for those of a key without limits

    def latest(self) -> dict[str, list[Use]]:
        """Returns what was noted in the last minute, by key, the oldest first."""
        now_s = self._clock()
        for account in self._accounts.values():
            self._forget_old(account)
        return {
            key: [(now_s - at_s, gpu_s, num_finished) for at_s, gpu_s, num_finished in account.latest]
            for key, account in self._accounts.items()
            if account.latest
        }

    def restore(self, key: str, uses: Sequence[Use]) -> None:
        """Counts what was noted elsewhere, some time ago."""
        account, now_s = self._accounts[key], self._clock()
        account.num_requests += sum(num_finished for _, _, num_finished in uses)
        account.gpu_s += sum(gpu_s for _, gpu_s, _ in uses)
        entries = [*account.latest, *((now_s - ago_s, gpu_s, num) for ago_s, gpu_s, num in uses)]
        account.latest = deque(sorted(entries))

    def used(self, key: str) -> tuple[int, float, float]:
        """Returns how many pictures and clips were finished, all GPU-seconds, and those of the last minute."""
        account = self._accounts[key]
        self._forget_old(account)
        return account.num_requests, account.gpu_s, _gpu_s(account)

    def check(self, key: str, num: int = 1, num_clips: int = 0) -> None:
        """Raises LimitReachedError if the key may not have ``num`` more under way now, beside ``num_clips``."""
        self.check_open(key, num, num_clips)
        self.check_minute(key)

    def check_open(self, key: str, num: int, num_clips: int = 0) -> None:
        """The same, by what is under way alone."""
        limits, account = self.limits_of(key), self._accounts[key]
        num_open = account.num_open + num_clips
        if limits.max_concurrent is not None and num_open + num > limits.max_concurrent:
            under_way = counted(num_open, "picture or clip", "pictures and clips")
            message = f"{under_way} of this key under way; the limit is {limits.max_concurrent}"
            raise LimitReachedError(message, 1.0)

    def check_minute(self, key: str) -> None:
        """The same, by what was used in the last minute alone."""
        account, allowed_s = self._accounts[key], self.limits_of(key).gpu_seconds_per_minute
        self._forget_old(account)
        used_s = _gpu_s(account)
        if allowed_s is not None and used_s >= allowed_s:
            message = f"this key has used {used_s:.1f} GPU-seconds in the last minute, and {allowed_s:g} may be"
            raise LimitReachedError(message, self._until_free_s(account, allowed_s))

    def add_open(self, key: str, num: int) -> None:
        """Counts ``num`` more under way, or fewer where it is below 0; what was checked has to be counted at once."""
        self._accounts[key].num_open += num

    @contextmanager
    def taken(self, key: str, num: int, num_clips: int = 0) -> Iterator[None]:
        """Holds ``num`` under way for the key inside the block. LimitReachedError as ``check``."""
        self.check(key, num, num_clips)
        self.add_open(key, num)
        try:
            yield
        finally:
            self.add_open(key, -num)

    def _until_free_s(self, account: _Account, allowed_s: float) -> float:
        """Until enough of the last minute's use is older than that."""
        left_s = _gpu_s(account)
        for at_s, gpu_s, _ in account.latest:
            left_s -= gpu_s
            if left_s < allowed_s:
                return max(0.0, at_s + MINUTE_S - self._clock())
        return MINUTE_S

    def _forget_old(self, account: _Account) -> None:
        while account.latest and account.latest[0][0] <= self._clock() - MINUTE_S:
            account.latest.popleft()


def _gpu_s(account: _Account) -> float:
    """Returns the GPU-seconds of the last minute, of an account that has forgotten older ones."""
    return sum(gpu_s for _, gpu_s, _ in account.latest)
