"""Sleep and wake-up of a gang: all ranks, between two steps, called by its scheduler task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from engines.core.logs import log_phase
from engines.core.resources import MemoryUse
from engines.gang.eta.admission import AWAKE, WakeUp
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.ledger import Ledger
from engines.gang.metrics import GangMetrics
from engines.gang.watchdog import answers_within, any_is_set


class GangSleep:
    """Sleep state of a gang: are its weights on its devices, and should they be?

    Jobs are admitted and dropped while it is asleep, and their states stay on the ranks. Steps wait.
    """

    def __init__(
        self, config: GangConfig, ranks: Sequence[Any], ledger: Ledger, clock: Clock, metrics: GangMetrics
    ) -> None:
        self._config, self._ranks, self._ledger, self._clock, self._metrics = config, ranks, ledger, clock, metrics
        self._is_asleep = self._wants_sleep = False
        self._has_slept = False
        self._moved = asyncio.Event()
        self._wake_s = 0.0
        """Duration of the last wake-up; until one was measured, of the last sleep."""
        self._awake_at_s = 0.0
        """Time at which it is expected to be awake, while it is not."""
        self.uses: tuple[MemoryUse, ...] = ()
        """Memory of each rank after the last sleep."""

    @property
    def may_work(self) -> bool:
        """True if steps may be sent."""
        return not (self._is_asleep or self._wants_sleep)

    @property
    def wake_up(self) -> WakeUp:
        """The time until steps may be sent. It is no shorter than a wake-up was, until the gang is awake."""
        if self.may_work:
            return AWAKE
        return WakeUp(total_s=max(self._wake_s, self._awake_at_s - self._clock.now_s()), swap_s=self._wake_s)

    def expect(self, wake_s: float) -> None:
        """Take the predicted seconds until the gang is awake."""
        self._awake_at_s = self._clock.now_s() + wake_s

    def want(self, *, asleep: bool) -> None:
        """Let the next ``settle`` change the state."""
        self._wants_sleep = asleep
        self._notify()

    async def reached(self, *, asleep: bool, ended: asyncio.Event) -> None:
        """Wait until the state is reached, or another one is wanted, or the gang has ``ended``."""
        while self._is_asleep != asleep and self._wants_sleep == asleep and not ended.is_set():
            await any_is_set(self._moved, ended)

    async def settle(self) -> bool:
        """Change the state if another one is wanted, after all steps in flight. The caller sends none meanwhile.

        Return whether it changed. ``GangBrokenError`` if a rank fails, dies, or is late.
        """
        has_changed = False
        while self._is_asleep != self._wants_sleep:
            sleeps = self._wants_sleep
            for end in self._ledger.ends(range(self._config.num_ranks)):
                await end.wait()
            begun_s = self._clock.now_s()
            answers: list[MemoryUse] = await self._call("sleep" if sleeps else "wake")
            self.uses = tuple(answers) if sleeps else self.uses
            swap_s = self._clock.now_s() - begun_s
            self._wake_s = self._wake_s if sleeps and self._has_slept else swap_s
            self._is_asleep, self._has_slept = sleeps, self._has_slept or sleeps
            self._ledger.interrupt()
            self._metrics.swapped(is_asleep=sleeps, swap_s=swap_s)
            log_phase("gang: sleep" if sleeps else "gang: wake", swap_s, model=self._metrics.model)
            self._notify()
            has_changed = True
        return has_changed

    def _notify(self) -> None:
        """Let ``reached`` look again."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def _call(self, method: str) -> list[Any]:
        """Return the ranks' answers. The first sleep may wait for host memory that is being pinned."""
        is_slow = method == "sleep" and not self._has_slept
        limit_s = self._config.start_deadline_s if is_slow else self._config.step_deadline_s
        calls = (getattr(rank, method).remote() for rank in self._ranks)
        return await answers_within(self._clock, limit_s, calls, method)
