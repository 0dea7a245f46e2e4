"""A gang's clock that a test sets, and simulated ranks whose step times the test sets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from engines.gang.gang_config import Clock
from engines.gang.jobs.step_plan import StepPlan, StepReport

NUM_TURNS = 20
"""Turns of the event loop: more than a message within a gang passes through."""


class SetClock(Clock):
    """Stands still except in ``advance``, however long the machine takes."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._timeouts: list[tuple[float, asyncio.Timeout]] = []

    def now_s(self) -> float:
        return self._now_s

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        timeout = asyncio.timeout(None if delay_s is None or delay_s > 0 else 0)
        if delay_s is not None and delay_s > 0:
            self._timeouts.append((self._now_s + delay_s, timeout))
        return timeout

    async def advance(self, by_s: float) -> None:
        """Advance the clock. Timeouts that end meanwhile end one after the other, each at its own time."""
        end_s = self._now_s + by_s
        while due := [entry for entry in self._timeouts if entry[0] <= end_s]:
            first = min(due, key=lambda entry: entry[0])
            self._timeouts.remove(first)
            self._now_s = first[0]
            with suppress(RuntimeError):  # its scope has ended
                first[1].reschedule(asyncio.get_running_loop().time())
            await settled()
        self._now_s = end_s


async def settled() -> None:
    """Wait until the tasks of this event loop that wait for nothing else have gone on."""
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


class SetRanks:
    """Actors of ranks that admit every job at once and work on a step until ``finish_step``."""

    def __init__(self, num_ranks: int, clock: SetClock) -> None:
        self._clock = clock
        self._at_work: list[deque[tuple[StepPlan, list[asyncio.Future[Any]]]]] = [deque() for _ in range(num_ranks)]
        self.actors = [self._actor(rank) for rank in range(num_ranks)]

    def _actor(self, rank: int) -> SimpleNamespace:
        return actor(partial(self._begin, rank), lambda: answered(None))

    @property
    def num_sent(self) -> int:
        """Return the number of steps that rank 0 has queued, including the running one."""
        return len(self._at_work[0])

    def _begin(self, rank: int, plan: StepPlan, num_returns: int) -> Any:
        refs: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future() for _ in range(num_returns)]
        self._at_work[rank].append((plan, refs))
        return refs if num_returns > 1 else refs[0]

    async def finish_step(self, step_s: float, **told: Any) -> None:
        """End the oldest step on all ranks, ``step_s`` from now. ``told`` are fields of their reports."""
        await self._clock.advance(step_s)
        for rank, plans in enumerate(self._at_work):
            plan, (report, *latents) = plans.popleft()
            ended_ms = {plan.sequence: 1e3 * step_s}
            done = StepReport(rank=rank, sequence=plan.sequence, ended_ms=ended_ms, **told)
            report.set_result(done)
            for each in latents:
                each.set_result(None)
        await settled()


def actor(send: Callable[[StepPlan, int], Any], answer: Callable[[], Any]) -> SimpleNamespace:
    """Return what a gang calls of a rank. A plan goes to ``send`` with the number of its results, and ``answer``
    answers all else; ``watch`` never ends."""

    def execute(num_returns: int) -> SimpleNamespace:
        return remote(lambda plan: send(plan, num_returns))

    beside = remote(lambda *_: answer())
    return SimpleNamespace(
        admit=beside,
        close=beside,
        ping=beside,
        sleep=beside,
        wake=beside,
        watch=remote(lambda: asyncio.get_running_loop().create_future()),
        execute=SimpleNamespace(options=execute),
    )


def remote(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(remote=function)


def answered(answer: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future
