"""A step gets the long deadline while its own ranks have something to prepare. The error of a failed step names its
cause."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from engines.gang.errors import GangBrokenError
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import JobStep, StepReport, Work
from engines.gang.ledger import InFlightStep
from engines.gang.watchdog import DEATH_NOTICE_S, Watchdog
from engines.tensorrt_engine import engine as tensorrt_engine
from engines.torch_engine import steps as torch_engine
from tests.engines.gang.support.set_clock import SetClock, SetRanks, answered, remote, settled

pytestmark = pytest.mark.asyncio

SLOW_S = 2.0
CONFIG = GangConfig(num_ranks=4, cpus_per_rank=1, step_deadline_s=SLOW_S / 2, start_deadline_s=10 * SLOW_S)
SHAPED = Job(job_id="shaped", request=None, conditioning=None, num_steps=9, shape=(64, 64))
OTHER = Job(job_id="other", request=None, conditioning=None, num_steps=9)
LEAST_KEPT = min(torch_engine.MAX_SHAPES, tensorrt_engine.MAX_SHAPES)
LEFT, RIGHT = (0, 1), (2, 3)


class Steps:
    """Slow steps of simulated ranks, under a watchdog whose clock only the steps advance."""

    def __init__(self) -> None:
        self._clock = SetClock()
        self._watchdog = Watchdog(CONFIG, SetRanks(CONFIG.num_ranks, self._clock).actors, self._clock)

    async def has_time(
        self,
        ranks: tuple[int, ...],
        *,
        was_warm: bool,
        job: Job = SHAPED,
        step: int = 2,
        step_s: float = SLOW_S,
        predicted: bool = True,
    ) -> bool:
        """Return whether the deadline lets this step pass, after which all of ``ranks`` report ``was_warm``."""
        work = Work(job_steps=(JobStep(job_id=job.job_id, step=step),), ranks=ranks)
        reports = [asyncio.get_running_loop().create_future() for _ in range(CONFIG.num_ranks)]
        in_flight = InFlightStep(work=work, pending=dict(enumerate(reports)))
        watching = asyncio.ensure_future(self._watchdog.reports(in_flight, {job.job_id: job}))
        await settled()
        await self._clock.advance(step_s)
        if not watching.done():
            for rank, report in enumerate(reports):
                warmth = was_warm or rank not in ranks
                report.set_result(StepReport(rank=rank, sequence=0, was_warm=warmth, predicted=predicted))
        try:
            await watching
        except GangBrokenError:
            return False
        return True


async def test_a_shape_is_cold_until_its_ranks_have_found_all_ready() -> None:
    """The first step compiles, the second captures."""
    steps = Steps()
    assert await steps.has_time(LEFT, was_warm=False, step=1)
    assert await steps.has_time(LEFT, was_warm=False)
    assert await steps.has_time(LEFT, was_warm=True)
    assert not await steps.has_time(LEFT, was_warm=True)


async def test_ranks_do_not_warm_a_shape_for_others() -> None:
    steps = Steps()
    assert await steps.has_time(LEFT, was_warm=True)
    assert await steps.has_time(RIGHT, was_warm=True)
    assert not await steps.has_time(RIGHT, was_warm=True)


async def test_what_turns_out_cold_in_the_middle_of_a_job_is_cold() -> None:
    """A second transformer does this: its first step is quick enough, and its second one captures."""
    steps = Steps()
    assert await steps.has_time(LEFT, was_warm=True)
    assert await steps.has_time(LEFT, was_warm=False, step_s=0.0)
    assert await steps.has_time(LEFT, was_warm=False)
    assert await steps.has_time(LEFT, was_warm=True)
    assert not await steps.has_time(LEFT, was_warm=True)


async def test_what_engines_may_have_let_go_of_is_cold() -> None:
    """Engines keep graphs for at least ``LEAST_KEPT`` shapes, and a job may have two."""
    steps, others = Steps(), [replace(SHAPED, shape=(64, height)) for height in range(1, LEAST_KEPT // 2 + 1)]
    assert await steps.has_time(LEFT, was_warm=True)
    for other in others:
        assert await steps.has_time(LEFT, was_warm=True, job=other)
    assert await steps.has_time(LEFT, was_warm=False), "it is captured again"
    assert not await steps.has_time(LEFT, was_warm=True, job=others[-1]), "this one came a moment ago"


async def test_of_jobs_without_a_shape_the_first_step_is_cold() -> None:
    steps = Steps()
    assert await steps.has_time(LEFT, was_warm=True, job=OTHER, step=1)
    assert not await steps.has_time(LEFT, was_warm=True, job=OTHER, step=2)


async def test_a_step_without_a_forward_says_nothing_of_what_is_ready() -> None:
    """A job may move to other ranks at a step that reuses the last prediction."""
    steps = Steps()
    assert await steps.has_time(LEFT, was_warm=True, predicted=False)
    assert await steps.has_time(LEFT, was_warm=False), "the first forward compiles"
    assert await steps.has_time(LEFT, was_warm=True)
    assert await steps.has_time(LEFT, was_warm=True, predicted=False, step_s=0.0)
    assert not await steps.has_time(LEFT, was_warm=True), "they are as warm as before it"


class Failing:
    """A step that fails on rank 0 of two, under a watchdog. ``death`` resolves when the other rank dies."""

    def __init__(self, *, is_alive: bool) -> None:
        self.clock = SetClock()
        actors = SetRanks(2, self.clock).actors
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        actors[1].watch = remote(lambda: self.death)
        actors[1].ping = remote(lambda: answered(1) if is_alive else self.death)
        watchdog = Watchdog(CONFIG, actors, self.clock)
        reports = [asyncio.get_running_loop().create_future() for _ in actors]
        reports[0].set_exception(RuntimeError("the exchange failed"))
        step = InFlightStep(work=None, pending=dict(enumerate(reports)))
        self.watching = asyncio.ensure_future(watchdog.reports(step, {}))

    async def explanation(self) -> tuple[str, str]:
        with pytest.raises(GangBrokenError) as caught:
            await self.watching
        return caught.value.cause, caught.value.reason


FAILED = ("error", "rank 0 failed: the exchange failed")


async def test_an_exchange_that_failed_waits_for_news_of_a_death_however_late() -> None:
    step = Failing(is_alive=False)
    await settled()
    await step.clock.advance(0.9 * DEATH_NOTICE_S)
    assert not step.watching.done()
    step.death.set_exception(ActorDiedError())
    cause, reason = await step.explanation()
    assert cause == "death"
    assert reason.startswith("rank 1 died: The actor died")


async def test_where_all_ranks_are_alive_nothing_is_waited_for() -> None:
    assert await Failing(is_alive=True).explanation() == FAILED


async def test_a_rank_that_neither_answers_nor_dies_is_not_waited_for_longer_than_that() -> None:
    step = Failing(is_alive=False)
    await settled()
    await step.clock.advance(DEATH_NOTICE_S)
    assert await step.explanation() == FAILED
