"""Clients of gangs that break: some go away, ranks die, and each job has one end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

import pytest

from engines.gang import driver as driver_module
from engines.gang import gang as gang_module
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobDone, PreviewReady, Progress
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import submit
from tests.engines.gang.support.virtual_time import GpuRanks, virtual_gang

NUM_RANKS = 4
STEPS = {"small": {1: 0.035, 2: 0.021, 4: 0.013}, "large": {1: 0.730, 2: 0.398, 4: 0.183}}
REBUILD_S, NOTICED_S = 1.0, 0.01
"""Time from one gang's end to the next gang, and until callers no longer get the broken one."""
OVER_WITHIN_S, SETTLED_S = 600.0, 20.0
"""Many times what the whole run takes, and what work under way takes to end, by the loop's clock."""
MAX_BROKEN_GANGS = 2
"""A job that was running in this many broken gangs fails, and its client gets the error."""

End = Literal["answered", "refused", "given up", "left"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Arrives ``at_s`` with a job. It leaves after ``leaves_after_s`` or a step, whichever comes first."""

    at_s: float
    job: Job
    leaves_after_s: float | None = None
    leaves_at_step: int | None = None


def clients(random: Random, num: int, over_s: float) -> list[Client]:
    """Return clients of three keys and all tiers; a third leave, and some have deadlines."""
    return [
        Client(
            at_s=random.uniform(0.0, over_s),
            job=_job(random, f"job{number}"),
            leaves_after_s=random.uniform(0.0, 2.0) if number % 6 == 0 else None,
            leaves_at_step=random.randint(1, 4) if number % 6 == 3 else None,
        )
        for number in range(num)
    ]


def _job(random: Random, name: str) -> Job:
    shape = random.choices(["small", "large"], [4, 1])[0]
    num_steps = random.randint(4, 12)
    deadline_s = random.uniform(0.5, 5.0) * num_steps * STEPS[shape][NUM_RANKS] if random.random() < 0.2 else None
    return fake_job(
        name,
        FakeRequest(seed=0, num_steps=num_steps),
        shape=shape,
        key=random.choice("abc"),
        weight=random.choice([1.0, 3.0]),
        priority=random.choice([0.25, 1.0, 4.0]),
        deadline_s=deadline_s,
        preview_steps=frozenset({2}) if random.random() < 0.3 else frozenset(),
    )


def known_times() -> StepTimes:
    """Return step times as after a first load, so that finishes are predicted and deadlines checked."""
    known = StepTimes()
    for shape, by_size in STEPS.items():
        for size, step_s in by_size.items():
            for _ in range(2):
                known.hear_step(fake_job("known", FakeRequest(seed=0, num_steps=2), shape=shape), size, step_s)
    assert known.changed()
    return known


@dataclass(kw_only=True)
class Storm:
    """Runs one gang after another on ranks of its own. ``ends`` has each client's outcomes."""

    config: GangConfig
    shapes: dict[str, Any]
    lives: list[tuple[Gang, GpuRanks]] = field(default_factory=list)
    ends: dict[str, list[End]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = known_times()
        self._is_ready = asyncio.Event()
        self._keeping = asyncio.ensure_future(self._keep())

    @property
    def ranks(self) -> GpuRanks:
        return self.lives[-1][1]

    def _die(self, rank: int) -> None:
        self.ranks.die(rank)

    async def weather(self, coming: Sequence[Client], deaths_s: Sequence[tuple[float, int]]) -> None:
        """Return when all clients have gone. At each time of ``deaths_s`` a rank of the running gang dies."""
        loop = asyncio.get_running_loop()
        await self._is_ready.wait()
        for at_s, rank in deaths_s:
            loop.call_later(at_s, self._die, rank)
        async with asyncio.timeout(OVER_WITHIN_S):
            await asyncio.gather(*(self._served(one) for one in coming))
        await asyncio.sleep(SETTLED_S)
        await self._is_ready.wait()
        self._keeping.cancel()

    async def _keep(self) -> None:
        while True:
            ranks = GpuRanks(NUM_RANKS, STEPS, self.shapes)
            async with virtual_gang(self.config, ranks, model="storm", step_times=self._known) as gang:
                self.lives.append((gang, ranks))
                self._is_ready.set()
                await gang._driver.ended.wait()
            self._is_ready.clear()
            await asyncio.sleep(REBUILD_S)

    async def _served(self, client: Client) -> None:
        await asyncio.sleep(client.at_s)
        try:
            async with asyncio.timeout(client.leaves_after_s):
                end = await self._asked(client)
        except TimeoutError:
            end = "left"
        self.ends.setdefault(client.job.job_id, []).append(end)

    async def _asked(self, client: Client) -> End:
        """Retry when a gang has broken, like the service: alone, if the job may be the cause."""
        num_broken = 0
        while num_broken < MAX_BROKEN_GANGS:
            await self._is_ready.wait()
            try:
                return await self._followed(replace(client.job, exclusive=num_broken > 0), client.leaves_at_step)
            except (QueueFullError, ValueError):
                return "refused"
            except GangBrokenError as error:
                num_broken += error.in_flight
                await asyncio.sleep(NOTICED_S)
        return "given up"

    async def _followed(self, job: Job, leaves_at_step: int | None) -> End:
        steps: list[int] = []
        async with aclosing(submit(self.lives[-1][0], job)) as events:
            async for event in events:
                if isinstance(event, Progress):
                    steps.append(event.step)
                    if event.step == leaves_at_step:
                        return "left"
                elif isinstance(event, PreviewReady):
                    shown: Any = event.latents
                    assert (shown.job_id, shown.step) == (job.job_id, event.step)
        assert isinstance(event, JobDone)
        latents: Any = event.latents
        assert (latents.job_id, latents.step, latents.emit) == (job.job_id, job.num_steps, "final"), "its own, whole"
        assert steps == list(range(1, job.num_steps + 1)), "each once, in order"
        return "answered"


@contextmanager
def nothing_to_kill() -> Iterator[None]:
    """Disable killing: simulated ranks have no processes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (driver_module, gang_module):
            patch.setattr(module, "kill_ranks", lambda _: None)
        yield
