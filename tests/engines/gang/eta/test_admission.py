"""A gang refuses jobs that would wait for others longer than ``max_wait_s``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from engines.core.field_error import FieldError
from engines.gang import gang as gang_module
from engines.gang.errors import TooLateError
from engines.gang.eta.admission import AWAKE, JobAdmission, WakeUp
from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import StepPrediction, shape_name
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobDone, JobQueued
from engines.gang.jobs.job_table import JobTable
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.ledger import InFlightStep, Ledger
from engines.gang.metrics import GangMetrics
from engines.gang.policies.policy import make_policy
from tests.engines.gang.support.checks import metric
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.set_clock import SetClock, SetRanks, settled

NUM_RANKS, NUM_STEPS = 2, 10
SMALL, LARGE, NEW = "small", "large", "new"
STEPS_S = {SMALL: 0.1, LARGE: 2.0}
SMALL_S, LARGE_S = (NUM_STEPS * step_s for step_s in STEPS_S.values())
MODEL = "with a longest wait"


class Door:
    """Admits jobs like a gang with measured step times for these shapes."""

    def __init__(
        self, max_wait_s: float | None, *, policy: str = "arrival", steps_s: Mapping[str, float] = STEPS_S
    ) -> None:
        self._clock = SetClock()
        config, metrics = GangConfig(num_ranks=NUM_RANKS), GangMetrics(MODEL)
        self.table = JobTable(config, metrics, self._clock)
        measured = {(shape_name(shape), NUM_RANKS): step_s for shape, step_s in steps_s.items()}
        self._scheduler = Scheduler(
            num_ranks=NUM_RANKS,
            max_running_jobs=4,
            policy=make_policy(policy),
            prediction=StepPrediction(measured=measured),
        )
        self._ledger = Ledger(config, self.table, metrics, StepTimes(), self._clock)
        self.wake_up = AWAKE
        self._admission = JobAdmission(
            self._scheduler, self.table, self._ledger, self._clock, max_wait_s, lambda: self.wake_up
        )

    def open(self, name: str, shape: str, *, is_scheduled: bool = True, **fields: Any) -> float | None:
        """Return the seconds until the job is done. Raise TooLateError if it is refused."""
        job = replace(job_of(name, shape), **fields)
        eta_s = self._admission.admit(job)
        self.table.open(job, 1.0).is_scheduled = is_scheduled
        if is_scheduled:
            self._scheduler.add(job)
        return eta_s

    def begin_step(self) -> None:
        plan = self._scheduler.next_plan()
        assert plan is not None
        (work,) = plan.works
        step = InFlightStep(work=work, pending=dict.fromkeys(work.ranks))
        self._ledger.send(step)
        self._ledger.start(step, self._clock.now_s())

    async def advance(self, by_s: float) -> None:
        await self._clock.advance(by_s)

    @property
    def admission(self) -> JobAdmission:
        return self._admission


def job_of(name: str, shape: str) -> Job:
    return fake_job(name, FakeRequest(seed=1, num_steps=NUM_STEPS), shape=shape)


def refused(door: Door, name: str, shape: str, **fields: Any) -> TooLateError:
    with pytest.raises(TooLateError) as caught:
        door.open(name, shape, **fields)
    return caught.value


def test_who_would_wait_longer_is_refused_and_told_when_that_is_over() -> None:
    """Two small jobs of a second each are ahead of the third."""
    door = Door(max_wait_s=1.6)
    assert [door.open(name, SMALL) for name in "ab"] == pytest.approx([SMALL_S, 2 * SMALL_S])
    refusal = refused(door, "c", SMALL)
    assert refusal.retry_after_s == pytest.approx(2 * SMALL_S - 1.6)
    assert refusal.predicted_s == pytest.approx(3 * SMALL_S)
    assert "it would take about 3.0 s, and the longest wait, max_wait_s, is 1.6" in str(refusal)
    assert door.open("c", SMALL, accepted=True) == pytest.approx(3 * SMALL_S), "it has waited already"


def test_who_would_wait_just_so_long_is_taken() -> None:
    door = Door(max_wait_s=2 * SMALL_S + 0.01)
    assert [door.open(name, SMALL) for name in "abc"] == pytest.approx([SMALL_S, 2 * SMALL_S, 3 * SMALL_S])
    assert refused(door, "d", SMALL).retry_after_s == pytest.approx(SMALL_S - 0.01)


def test_the_wait_is_for_others_alone() -> None:
    """A job's own steps may take any time."""
    door = Door(max_wait_s=0.5)
    assert door.open("long", LARGE) == pytest.approx(LARGE_S)
    assert refused(door, "behind it", SMALL).retry_after_s == pytest.approx(LARGE_S - 0.5)


def test_a_job_of_a_gang_that_sleeps_waits_for_the_devices_too() -> None:
    door = Door(max_wait_s=6.0)
    door.wake_up = WakeUp(total_s=5.0, swap_s=0.5)
    assert door.open("a", SMALL) == pytest.approx(SMALL_S + 5.0)
    assert door.admission.next_end_s() == pytest.approx(SMALL_S + 5.0)
    assert door.admission.eta_s(door.table.get("a"), 0) == pytest.approx(SMALL_S + 5.0)
    assert door.admission.demand().backlog_s == pytest.approx(SMALL_S), "the arbiter asks for work alone"
    assert door.open("b", SMALL) == pytest.approx(2 * SMALL_S + 5.0)
    assert refused(door, "c", SMALL).retry_after_s == pytest.approx(2 * SMALL_S + 5.0 - 6.0)
    assert refused(door, "d", SMALL, deadline_s=7.0).predicted_s == pytest.approx(3 * SMALL_S + 5.0)


def test_the_first_job_of_a_gang_that_sleeps_is_refused_for_the_swap_alone() -> None:
    """A gang without jobs gets no turn, whatever its predicted wait."""
    door = Door(max_wait_s=1.0)
    door.wake_up = WakeUp(total_s=50.0, swap_s=0.5)
    assert refused(door, "a", SMALL, deadline_s=1.2).predicted_s == pytest.approx(SMALL_S + 0.5)
    assert door.open("b", SMALL, deadline_s=1.6) == pytest.approx(SMALL_S + 50.0)
    assert refused(door, "c", SMALL).predicted_s == pytest.approx(2 * SMALL_S + 50.0)


async def test_a_gang_that_sleeps_expects_its_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is the arbiter's prediction less the time since, at least what the last wake-up took."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    clock, known = SetClock(), StepTimes()
    for _ in range(2):
        known.hear_step(job_of("a", SMALL), NUM_RANKS, STEPS_S[SMALL])
    assert known.changed()
    parts: Any = {"infos": (), "team_sizes": (NUM_RANKS,), "model": MODEL, "clock": clock, "step_times": known}
    gang = Gang(GangConfig(num_ranks=NUM_RANKS), SetRanks(NUM_RANKS, clock).actors, **parts)
    gang.expect_wake(7.0)
    assert gang.wake_s == 0.0, "it is awake"
    await gang.sleep()
    assert gang.wake_s == pytest.approx(7.0)
    await clock.advance(3.0)
    assert gang.wake_s == pytest.approx(4.0)
    async with aclosing(gang.submit_grouped(job_of("a", SMALL), every_s=0.1)) as groups:
        (queued,) = await anext(groups)
        assert isinstance(queued, JobQueued)
        assert queued.eta_s == pytest.approx(SMALL_S + 4.0)
    await clock.advance(30.0)
    assert gang.wake_s == 0.0
    gang.expect_wake(2.0)
    assert gang.wake_s == pytest.approx(2.0)
    await gang.wake()
    assert gang.wake_s == 0.0
    await gang.close()


def test_who_goes_before_the_others_does_not_wait_for_them() -> None:
    door = Door(max_wait_s=0.5, policy="shortest")
    door.open("long", LARGE)
    assert door.open("short", SMALL) == pytest.approx(SMALL_S)
    assert refused(door, "long too", LARGE).predicted_s == pytest.approx(2 * LARGE_S + SMALL_S)


def test_who_has_a_turn_soon_does_not_wait_for_all_of_another_key() -> None:
    """A greedy key has twenty small jobs; each key gets two of them before the next key's turn."""
    door = Door(max_wait_s=None, policy="fair")
    for number in range(20):
        door.open(f"greedy {number}", SMALL, key="greedy")
    for _ in range(3):
        door.begin_step()
    eta_s = door.open("only one", SMALL, key="modest", deadline_s=10.0)
    assert eta_s is not None
    assert eta_s <= 2 * SMALL_S + SMALL_S + 1e-6


def test_jobs_that_come_at_one_time_wait_for_each_other() -> None:
    """Jobs that the ranks have not admitted yet count too."""
    door = Door(max_wait_s=0.5)
    door.open("a", SMALL, is_scheduled=False)
    assert refused(door, "b", SMALL).retry_after_s == pytest.approx(SMALL_S - 0.5)


async def test_the_gang_reports_the_seconds_of_its_open_jobs() -> None:
    door = Door(max_wait_s=None)
    door.open("a", SMALL)
    door.open("b", LARGE, is_scheduled=False, priority=4.0)
    door.open("new", NEW, is_scheduled=False)
    works = door.admission.open_work()
    assert works["a"].left_s == pytest.approx(SMALL_S)
    assert works["b"] == pytest.approx((LARGE_S, LARGE_S / 4))
    assert works["new"].left_s == pytest.approx((SMALL_S + LARGE_S) / 2), "the mean of what is known"
    report = door.admission.report()
    assert (report.num_jobs, report.num_arrived) == (3, 3)
    assert report.backlog_s == pytest.approx(1.5 * (SMALL_S + LARGE_S))
    assert report.arrived_s2 == pytest.approx(1.5 * (SMALL_S**2 + LARGE_S**2))
    door.begin_step()
    await door.advance(STEPS_S[SMALL] / 2)
    assert door.admission.open_work()["a"].left_s == pytest.approx(SMALL_S - STEPS_S[SMALL] / 2)


async def test_refused_jobs_count_as_arrivals_and_deadlines_leave_time_to_spare() -> None:
    door = Door(max_wait_s=0.5)
    door.open("a", LARGE)
    refused(door, "b", LARGE)
    assert door.admission.report().arrived_s == pytest.approx(2 * LARGE_S)
    assert door.admission.report().spare_s == math.inf
    door.open("c", SMALL, accepted=True, deadline_s=60.0, waited_s=2.0, decode_s=1.0)
    assert door.admission.report().spare_s == pytest.approx(60.0 - 3.0 - SMALL_S)
    await door.advance(121.0)
    assert door.admission.report().spare_s == math.inf, "no deadline for two minutes"


async def test_what_is_left_of_the_step_under_way_is_waited_for_whoever_is_next() -> None:
    door = Door(max_wait_s=0.9, policy="shortest")
    door.open("long", LARGE)
    door.begin_step()
    assert refused(door, "short", SMALL).retry_after_s == pytest.approx(STEPS_S[LARGE] - 0.9)
    await door.advance(0.5)
    assert refused(door, "short", SMALL).retry_after_s == pytest.approx(STEPS_S[LARGE] - 0.5 - 0.9)
    await door.advance(0.7)
    assert door.open("short", SMALL) == pytest.approx(STEPS_S[LARGE] - 1.2 + SMALL_S)


def test_a_step_without_forwards_takes_nobody_any_time() -> None:
    door = Door(max_wait_s=None, policy="shortest")
    door.open("long", LARGE, idle_steps=frozenset({1}))
    door.begin_step()
    assert door.open("short", SMALL) == pytest.approx(SMALL_S)


def test_nobody_is_refused_by_a_guess() -> None:
    door = Door(max_wait_s=0.1)
    door.open("a", SMALL)
    assert door.open("of a new shape", NEW) is None
    assert door.open("behind it", SMALL) is None


def test_without_a_longest_wait_all_wait() -> None:
    door = Door(max_wait_s=None)
    door.open("long", LARGE)
    assert door.open("behind it", SMALL) == pytest.approx(LARGE_S + SMALL_S)


def test_a_deadline_leaves_time_to_decode() -> None:
    """A small job takes a second, and decoding another 0.4; the prediction covers the steps alone."""
    door = Door(max_wait_s=None)
    with pytest.raises(FieldError, match=r"deadline_s is 1\.3, and the steps and decoding alone take 1\.4 s") as never:
        door.open("never", SMALL, deadline_s=1.3, decode_s=0.4)
    assert never.value.field == "deadline_s"
    assert refused(door, "came late", SMALL, deadline_s=1.5, decode_s=0.4, waited_s=0.2).predicted_s == 1.6
    assert door.open("in time", SMALL, deadline_s=1.5, decode_s=0.4) == pytest.approx(SMALL_S)
    refusal = refused(door, "behind it", SMALL, deadline_s=2.2, decode_s=0.4)
    assert (refusal.predicted_s, refusal.retry_after_s) == pytest.approx((2.4, 0.2))
    assert door.open("decodes quickly", SMALL, deadline_s=2.2, decode_s=0.1) == pytest.approx(2 * SMALL_S)


def test_time_to_decode_is_known_before_steps_are() -> None:
    door = Door(max_wait_s=None)
    with pytest.raises(ValueError, match=r"deadline_s is 0\.3, and the steps and decoding alone take 0\.4 s"):
        door.open("never", NEW, deadline_s=0.3, decode_s=0.4)
    assert refused(door, "came late", NEW, deadline_s=0.5, decode_s=0.4, waited_s=0.2).limit_s == 0.5
    assert door.open("perhaps", NEW, deadline_s=0.5, decode_s=0.4) is None


def test_who_is_refused_is_counted_and_forgotten() -> None:
    door = Door(max_wait_s=0.5)
    door.open("a", SMALL)
    before = metric("troupe_jobs_total", model=MODEL, outcome="rejected")
    refused(door, "b", SMALL)
    assert metric("troupe_jobs_total", model=MODEL, outcome="rejected") == before + 1
    assert [job.job_id for job in door.table.open_jobs] == ["a"]
    assert refused(door, "b", SMALL).predicted_s == pytest.approx(2 * SMALL_S), "no job waits for it"


async def test_who_comes_again_when_told_to_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole gang works on a job of one second; a refused job is admitted after ``retry_after_s``."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    config, clock, known = GangConfig(num_ranks=NUM_RANKS, max_wait_s=0.5), SetClock(), StepTimes()
    ranks = SetRanks(NUM_RANKS, clock)
    for _ in range(2):
        known.hear_step(job_of("known", SMALL), NUM_RANKS, STEPS_S[SMALL])
    assert known.changed()
    parts = {"team_sizes": (NUM_RANKS,), "model": MODEL, "clock": clock, "step_times": known}
    gang = Gang(config, ranks.actors, infos=(), **parts)  # type: ignore[arg-type]
    first = asyncio.ensure_future(run(gang, job_of("first", SMALL)))
    await settled()
    with pytest.raises(TooLateError, match=r"max_wait_s, is 0\.5") as caught:
        await run(gang, job_of("second", SMALL))
    num_steps_to_wait = math.ceil(caught.value.retry_after_s / STEPS_S[SMALL])
    assert num_steps_to_wait == NUM_STEPS / 2
    for _ in range(num_steps_to_wait):
        await ranks.finish_step(STEPS_S[SMALL])
    second = asyncio.ensure_future(run(gang, job_of("second", SMALL)))
    await settled()
    for _ in range(2 * NUM_STEPS - num_steps_to_wait):
        await ranks.finish_step(STEPS_S[SMALL])
    assert [type(events[-1]) for events in await asyncio.gather(first, second)] == [JobDone, JobDone]
    await gang.close()


@pytest.mark.parametrize("max_wait_s", [0.0, -1.0])
def test_a_longest_wait_is_a_time(max_wait_s: float) -> None:
    with pytest.raises(ValueError, match=r"max_wait_s is .*; it must be a time above 0 s"):
        GangConfig(max_wait_s=max_wait_s)
