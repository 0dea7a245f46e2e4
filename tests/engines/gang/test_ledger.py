"""The ledger computes from ranks' reports when they are free, what steps and moves took, and which job is billed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.policies.h200 import STEPS
from engines.gang import gang as gang_module
from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import LEAD_S, LEAD_SHARE, USUAL_MOVE_S
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobDone, JobEvent, Progress
from engines.gang.jobs.job_table import JobTable
from engines.gang.jobs.step_plan import JobFailure, StepReport, Work
from engines.gang.ledger import InFlightStep, Ledger
from engines.gang.metrics import GangMetrics
from tests.engines.gang.support.checks import metric
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.set_clock import SetClock, SetRanks, settled
from tests.engines.gang.support.virtual_time import GpuRanks, run_in_virtual_time, virtual_gang

LONG_S, SHORT_S = 4.0, 0.02
LEAD_OF_LONG_S = LEAD_SHARE * LONG_S
NUM_STEPS = 28
NEAR = 0.02
CLIP = {"clip": {1: 6.0, 2: 3.1}}
ALL = {**STEPS, **CLIP}
SMALL, MIDDLE, LARGE = STEPS
PAIR = GangConfig(num_ranks=2, gpus_per_rank=1.0)


@pytest.fixture(autouse=True)
def no_ranks_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)


# When ranks are free.


class SetLedger(Ledger):
    """A ledger with a clock that the test sets."""

    def __init__(self, num_ranks: int, step_times: StepTimes | None = None, *, reports_early: bool = False) -> None:
        config = GangConfig(num_ranks=num_ranks, cpus_per_rank=0.1, gpus_per_rank=float(reports_early))
        self.clock, metrics = SetClock(), GangMetrics("ledger")
        table = JobTable(config, metrics, self.clock)
        super().__init__(config, table, metrics, step_times or StepTimes(), self.clock)

    def report(self, step: InFlightStep, now_s: float, sequence: int = 0, **move_ms: float) -> None:
        """Let all ranks of ``step`` report; ``rank0=…`` is the time of rank 0's moves."""
        reports = {
            rank: StepReport(rank=rank, sequence=sequence, move_ms=move_ms.get(f"rank{rank}", 0.0))
            for rank in step.pending
        }
        self.clock._now_s = now_s
        self.end(step)
        assert self.hear(step, reports, now_s, lambda *_: None) == []


def step_of(predicted_s: float, ranks: tuple[int, ...] = (0, 1), *, works: bool = True) -> InFlightStep:
    work = Work(job_steps=(), ranks=ranks)
    return InFlightStep(work=work if works else None, pending=dict.fromkeys(ranks), predicted_s=predicted_s)


def push(ledger: SetLedger, *steps: InFlightStep) -> InFlightStep:
    for step in steps:
        ledger.send(step)
    return steps[-1]


@pytest.mark.parametrize("reports_early", [False, True])
@pytest.mark.parametrize("predicted_s", [0.0, SHORT_S])
def test_short_steps_and_those_that_nobody_knows_go_out_at_once(reports_early: bool, predicted_s: float) -> None:
    ledger = SetLedger(2, reports_early=reports_early)
    assert ledger.free_ranks(2, 10.0) == {0, 1}
    push(ledger, step_of(predicted_s))
    assert ledger.free_ranks(2, 10.0) == {0, 1}
    push(ledger, step_of(predicted_s))
    assert ledger.free_ranks(2, 10.0) == set(), "the limit of steps in flight"
    assert ledger.next_free_in_s(2, 10.0) is None, "a report must come first"


def test_a_long_step_is_followed_shortly_before_its_end() -> None:
    ledger = SetLedger(3)
    long = push(ledger, step_of(LONG_S))
    assert ledger.free_ranks(2, 10.0) == {2}, "it may not even have begun"
    ledger.start(long, 10.0)
    assert ledger.next_free_in_s(2, 11.0) == pytest.approx(LONG_S - LEAD_OF_LONG_S - 1)
    assert ledger.free_ranks(2, 10 + LONG_S - 1.01 * LEAD_OF_LONG_S) == {2}
    assert ledger.free_ranks(2, 10 + LONG_S - 0.99 * LEAD_OF_LONG_S) == {0, 1, 2}
    assert ledger.free_ranks(2, 10 + 2 * LONG_S) == {0, 1, 2}, "it takes longer than predicted"
    assert ledger.next_free_in_s(2, 10 + 2 * LONG_S) is None


def test_a_rank_with_a_gpu_works_on_after_its_report() -> None:
    ledger = SetLedger(2, reports_early=True)
    long = push(ledger, step_of(LONG_S))
    ledger.start(long, 10.0)
    ledger.report(long, 10.5)
    assert not ledger.job_ids, "there is no report to come"
    assert ledger.free_ranks(2, 10.5) == set()
    assert ledger.next_free_in_s(2, 10.5) == pytest.approx(LONG_S - LEAD_OF_LONG_S)
    assert ledger.free_ranks(2, 10.5 + LONG_S - 0.99 * LEAD_OF_LONG_S) == {0, 1}
    push(ledger, step_of(LONG_S))
    assert ledger.free_ranks(2, 10.5 + LONG_S - 0.99 * LEAD_OF_LONG_S) == set(), "another one, all of it"


@pytest.mark.parametrize("predicted_s", [0.0, LONG_S])
def test_ranks_are_busy_until_the_last_has_done_what_it_was_sent(predicted_s: float) -> None:
    """Without measured times the caller's estimate of a step is used."""
    ledger = SetLedger(3)

    def busy_s(now_s: float) -> float:
        return ledger.busy_s(now_s, lambda _: LONG_S)

    assert busy_s(10.0) == 0.0
    first = push(ledger, step_of(predicted_s))
    assert busy_s(10.0) == LONG_S, "it may not even have begun"
    ledger.start(first, 10.0)
    push(ledger, step_of(predicted_s, ranks=(1,)), step_of(0.25 * LONG_S, ranks=(2,)))
    assert busy_s(11.0) == 2 * LONG_S - 1, "rank 1 does both"
    ledger.report(first, 11.5)
    assert busy_s(12.0) == LONG_S


def test_a_rank_with_a_gpu_is_busy_after_its_report() -> None:
    ledger = SetLedger(2, reports_early=True)
    ledger.report(push(ledger, step_of(LONG_S)), 10.0)
    assert ledger.busy_s(11.0, lambda _: LONG_S) == LONG_S - 1
    push(ledger, step_of(SHORT_S))
    assert ledger.busy_s(11.0, lambda _: LONG_S) == LONG_S - 1 + SHORT_S
    assert ledger.busy_s(20.0, lambda _: LONG_S) == SHORT_S


def test_what_ranks_do_beside_the_teams_of_a_plan_takes_them_no_time() -> None:
    ledger = SetLedger(2, reports_early=True)
    ledger.report(push(ledger, step_of(LONG_S)), 10.0)
    ledger.report(push(ledger, step_of(0.0, works=False)), 10.0)
    assert ledger.free_ranks(2, 10.0) == set(), "the step is still under way"


def test_reports_that_came_in_time_leave_a_rank_free() -> None:
    ledger = SetLedger(2)
    long = push(ledger, step_of(LONG_S))
    ledger.start(long, 10.0)
    ledger.report(long, 10.0 + LONG_S / 2)
    assert ledger.free_ranks(2, 10.0 + LONG_S / 2) == {0, 1}
    assert LEAD_S < LONG_S


# Times of steps and moves.


def test_the_rank_that_waited_for_no_other_says_what_moves_took() -> None:
    """Ranks of two teams report at their own times, with plans without moves between them."""
    times = StepTimes()
    ledger = SetLedger(3, times)

    def report(sequence: int, **move_ms: float) -> None:
        ranks = tuple(int(name.removeprefix("rank")) for name in move_ms)
        ledger.report(push(ledger, step_of(0.0, ranks, works=False)), 10.0, sequence, **move_ms)

    report(2, rank0=70.0, rank1=4.0)
    report(4, rank0=3.0, rank1=30.0, rank2=3.5)
    report(3, rank0=0.0, rank1=0.0, rank2=0.0)
    assert not times.changed(), "one is not enough, and not all have reported the second"
    assert times.prediction().move_s == USUAL_MOVE_S
    report(2, rank2=500.0)
    assert times.changed()
    assert times.prediction().move_s == 0.0035


def test_the_slowest_rank_says_what_a_change_of_weights_took() -> None:
    times = StepTimes()
    ledger = SetLedger(2, times)
    for sequence, switches_ms in enumerate([(80.0, 90.0), (0.0, 0.0), (110.0, 40.0)]):
        step = push(ledger, step_of(0.0, works=False))
        reports = {
            rank: StepReport(rank=rank, sequence=sequence, switch_ms=switch_ms)
            for rank, switch_ms in enumerate(switches_ms)
        }
        ledger.end(step)
        ledger.hear(step, reports, 10.0, lambda *_: None)
    assert times.changed()
    assert times.prediction().switch_s == pytest.approx(0.1)


async def test_what_ranks_skip_of_a_job_that_failed_is_no_time_of_a_step() -> None:
    """The second step was sent before the first one failed, and ends at once."""
    clock, config, times = SetClock(), GangConfig(num_ranks=2, cpus_per_rank=0.1), StepTimes()
    ranks = SetRanks(config.num_ranks, clock)
    gang = Gang(config, ranks.actors, (), (config.num_ranks,), "publishing", clock, times)
    for name in ("one", "other"):
        failing = asyncio.ensure_future(run(gang, fake_job(name, FakeRequest(seed=1, num_steps=4), shape="refused")))
        await settled()
        failure = JobFailure(job_id=name, error=ValueError("too large"))
        await ranks.finish_step(0.05, predicted=False, failures=(failure,))
        for _ in ("its second", "the drop"):
            await ranks.finish_step(0.001, predicted=False)
        with pytest.raises(ValueError, match="too large"):
            await failing
    running = asyncio.ensure_future(run(gang, fake_job("good", FakeRequest(seed=1, num_steps=4), shape="fits")))
    await settled()
    for _ in range(4):
        await ranks.finish_step(0.05)
    await running
    await gang.close()
    assert times.prediction().measured == {("'fits'", 2): pytest.approx(0.05)}


# The billed job.


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that arrives ``at_s``; it is cancelled ``leaves_s`` later."""

    at_s: float
    shape: str
    leaves_s: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def job(self, job_id: str) -> Job:
        request = FakeRequest(seed=1, num_steps=NUM_STEPS)
        return fake_job(job_id, request, shape=self.shape, **self.fields)


@dataclass
class LoadTimes:
    """``gpu_s`` has the reported times of finished jobs, ``left_s`` those of cancelled requests, ``rank_s`` the device
    time of each job. ``so_far_s`` has the time reported with each step."""

    gpu_s: dict[str, float] = field(default_factory=dict)
    left_s: dict[str, float] = field(default_factory=dict)
    so_far_s: dict[str, list[float]] = field(default_factory=dict)
    rank_s: dict[str, float] = field(default_factory=dict)
    counted_s: float = 0.0


def known_times() -> StepTimes:
    known = StepTimes()
    for shape, by_size in ALL.items():
        for size in PAIR_SIZES:
            for _ in range(2):
                known.hear_step(fake_job("known", FakeRequest(seed=0, num_steps=2), shape=shape), size, by_size[size])
    assert known.changed()
    return known


PAIR_SIZES = (1, PAIR.num_ranks)


def counted_s(model: str) -> float:
    """Return the seconds of ranks in steps by the metrics."""
    labels = [{"model": model, "num_ranks": str(size)} for size in PAIR_SIZES]
    return sum(int(each["num_ranks"]) * metric("troupe_step_seconds_sum", **each) for each in labels)


async def _run_load(requests: Sequence[Request], config: GangConfig, known: StepTimes) -> LoadTimes:
    seen, before_s = LoadTimes(), counted_s("seen")
    ranks = GpuRanks(config.num_ranks, ALL, {str(number): one.shape for number, one in enumerate(requests)})

    async with virtual_gang(config, ranks, model="seen", step_times=known) as gang:

        async def one(number: int, request: Request) -> None:
            await asyncio.sleep(request.at_s)
            name, events = str(number), list[JobEvent]()
            try:
                async with asyncio.timeout(request.leaves_s):
                    events = await run(gang, request.job(name))
            except TimeoutError:
                seen.left_s[name] = await gang.spent_s(name)
                return
            (seen.gpu_s[name],) = (event.gpu_s for event in events if isinstance(event, JobDone))
            seen.so_far_s[name] = [event.gpu_s for event in events if isinstance(event, Progress)]

        await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
    seen.rank_s, seen.counted_s = dict(ranks.rank_s), counted_s("seen") - before_s
    return seen


def seen_of(*requests: Request, config: GangConfig = PAIR, known: StepTimes | None = None) -> LoadTimes:
    return run_in_virtual_time(_run_load(requests, config, known or known_times()))


def assert_told_right(seen: LoadTimes) -> None:
    """Check the reported time of each job, and the sum of all."""
    told_s = seen.gpu_s | seen.left_s
    assert told_s == {job_id: pytest.approx(seen.rank_s[job_id], rel=NEAR) for job_id in told_s}
    assert seen.counted_s == pytest.approx(sum(seen.rank_s.values()), rel=NEAR)


@pytest.mark.parametrize("shape", ALL)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_job_took_what_its_steps_took(shape: str, is_known: bool) -> None:
    """This holds for unknown steps too, which are sent as soon as possible."""
    seen = seen_of(Request(at_s=0.0, shape=shape), known=known_times() if is_known else StepTimes())
    assert seen.rank_s["0"] == pytest.approx(2 * NUM_STEPS * ALL[shape][2]), "on both ranks"
    assert_told_right(seen)
    step_s = 2 * ALL[shape][2]
    assert seen.so_far_s["0"] == pytest.approx([*(step_s * i for i in range(NUM_STEPS - 1)), seen.gpu_s["0"]], rel=0.1)


@pytest.mark.parametrize("shape", ["clip", LARGE])
def test_jobs_in_turns_are_told_apart(shape: str) -> None:
    """Jobs of two keys take turns of two seconds; one's steps take up to a hundred times the other's."""
    requests = [Request(at_s=0.0, shape=one, fields={"key": one}) for one in (SMALL, shape)]
    seen = seen_of(*requests, config=GangConfig(num_ranks=2, gpus_per_rank=1.0, policy="fair"))
    assert len(seen.gpu_s) == 2
    assert_told_right(seen)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("preview_steps", [frozenset[int](), frozenset({7, 14, 21})])
def test_jobs_whose_teams_change_are_told_apart(elastic: bool, preview_steps: frozenset[int]) -> None:
    """A rank is in no step while it waits for its team or for a state to move."""
    shapes = [MIDDLE, SMALL, SMALL, "clip", SMALL, MIDDLE, LARGE, SMALL] * 3
    requests = [
        Request(at_s=3.7 * number, shape=shape, fields={"preview_steps": preview_steps})
        for number, shape in enumerate(shapes)
    ]
    seen = seen_of(*requests, config=GangConfig(num_ranks=2, gpus_per_rank=1.0, elastic=elastic))
    assert len(seen.gpu_s) == len(requests)
    assert_told_right(seen)


def test_a_gang_that_idles_works_for_nobody() -> None:
    seen = seen_of(*(Request(at_s=1000.0 * number, shape=SMALL) for number in range(3)))
    assert_told_right(seen)


@pytest.mark.parametrize("shape", ["clip", LARGE])
def test_what_a_cancelled_job_took_is_counted_and_is_not_the_next_ones(shape: str) -> None:
    """The time of its last step is reported when that step ends, before any other job arrives."""
    left = Request(at_s=0.0, shape=shape, leaves_s=5.3 * ALL[shape][2])
    seen = seen_of(left, Request(at_s=1000.0, shape=SMALL))
    assert 5 * ALL[shape][2] < seen.rank_s["0"] / 2 < 8 * ALL[shape][2]
    assert (list(seen.left_s), list(seen.gpu_s)) == (["0"], ["1"])
    assert_told_right(seen)
