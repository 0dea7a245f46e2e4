"""Accounts of one process by itself, where no key has limits."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from deployments.observability.keys import KeyNames
from deployments.usage.interface import Balance
from deployments.usage.quotas import KeyLimits, Quotas


class OwnAccounts:
    """``Accounts`` in this process alone: nobody is asked. ``clock`` gives seconds."""

    is_shared = False

    def __init__(self, limits: Iterable[KeyLimits] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.quotas = Quotas(limits, clock)
        self._names = KeyNames(self.quotas.limits_of)

    def limits_of(self, key: str) -> KeyLimits:
        """See ``Accounts``."""
        return self.quotas.limits_of(key)

    @asynccontextmanager
    async def taken(self, key: str, num: int, num_clips: int = 0) -> AsyncIterator[None]:
        """See ``Accounts``."""
        with self.quotas.taken(key, num, num_clips):
            yield

    def note(self, key: str, model: str, gpu_s: float, *, is_finished: bool = True) -> None:
        """See ``Accounts``."""
        self.quotas.note(key, gpu_s, int(is_finished))
        self._names.observe_gpu_seconds(model, key, gpu_s)

    async def used(self, key: str) -> Balance:
        """See ``Accounts``."""
        num_requests, gpu_s, last_s = self.quotas.used(key)
        return Balance(since=self.quotas.started_at, num_requests=num_requests, gpu_s=gpu_s, last_minute_s=last_s)
