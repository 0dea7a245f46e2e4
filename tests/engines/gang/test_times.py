"""When a gang says what, by a clock that the test sets; its ranks' steps last as long as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import pytest_asyncio

from engines.gang import gang as gang_module
from engines.gang.config import GangConfig
from engines.gang.errors import TooLateError
from engines.gang.gang import Gang
from engines.gang.job import Job, JobDone, JobEvent, JobQueued, PreviewReady, StepDone
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.set_clock import SetClock, SetRanks, settled

CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def ranks(clock: SetClock) -> SetRanks:
    return SetRanks(CONFIG.num_ranks, clock)


@pytest_asyncio.fixture
async def gang(clock: SetClock, ranks: SetRanks, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    gang = Gang(CONFIG, ranks.actors, infos=(), team_sizes=(CONFIG.num_ranks,), model="timed", clock=clock)
    yield gang
    assert gang.broken is None
    await gang.close()


async def test_quick_steps_come_in_groups_and_everything_else_at_once(
    gang: Gang, clock: SetClock, ranks: SetRanks
) -> None:
    """A step lasts 13 ms and a group at least 100: 8 steps go into one, but for the first step and what is no step."""
    groups: list[tuple[float, tuple[JobEvent, ...]]] = []
    job, begun_s = fake_job("grouped", FakeRequest(seed=1, num_steps=40), preview_steps=frozenset({20})), clock.now_s()

    async def follow() -> None:
        async for group in gang.submit_grouped(job, every_s=0.1):
            groups.append((clock.now_s() - begun_s, group))

    following = asyncio.ensure_future(follow())
    await settled()
    for _ in range(40):
        await ranks.finish_step(0.013)
    await following
    came_s, (queued,) = groups.pop(0)
    assert (came_s, type(queued)) == (0.0, JobQueued)
    last_steps = [max(event.step for event in group if isinstance(event, StepDone)) for _, group in groups]
    assert [event.step for _, group in groups for event in group if isinstance(event, StepDone)] == [*range(1, 41)]
    assert last_steps == [1, 8, 16, 20, 27, 35, 40]
    assert [came_s for came_s, _ in groups] == pytest.approx([0.013, 0.113, 0.213, 0.260, 0.360, 0.460, 0.520])
    others = [
        (index, event) for index, (_, group) in enumerate(groups) for event in group if type(event) is not StepDone
    ]
    assert [(index, type(event)) for index, event in others] == [(3, PreviewReady), (6, JobDone)]
    assert all(type(event) is StepDone for _, group in groups for event in group[:-1])


async def test_times_are_told_apart(gang: Gang, ranks: SetRanks) -> None:
    """The second of two jobs that are alike waits for all ten steps of the first."""
    jobs = [fake_job(name, FakeRequest(seed=1, num_steps=10)) for name in ("first", "second")]
    running = [asyncio.ensure_future(run(gang, job)) for job in jobs]
    await settled()
    for _ in range(20):
        await ranks.finish_step(0.05)
    (*_, first), (*_, second) = await asyncio.gather(*running)
    assert isinstance(first, JobDone)
    assert isinstance(second, JobDone)
    assert (first.queue_s, first.denoise_s) == pytest.approx((0.0, 0.5))
    assert (second.queue_s, second.denoise_s) == pytest.approx((0.5, 0.5))


STEP_S = 0.05
NUM_STEPS = 10


def shaped_job(name: str, **fields: object) -> Job:
    return fake_job(name, FakeRequest(seed=1, num_steps=NUM_STEPS), shape="square", **fields)


async def measured(gang: Gang, ranks: SetRanks) -> None:
    """A job after which the gang knows how long a step takes."""
    running = asyncio.ensure_future(run(gang, shaped_job("first")))
    await settled()
    for _ in range(NUM_STEPS):
        await ranks.finish_step(STEP_S)
    await running


async def opened(gang: Gang, job: Job) -> tuple[float, AsyncGenerator[tuple[JobEvent, ...]]]:
    """What a job is told when it comes, and what it will be told."""
    stream = gang.submit_grouped(job, every_s=0.0)
    (queued,) = await anext(stream)
    assert isinstance(queued, JobQueued)
    return queued.eta_s, stream


async def test_a_job_is_told_when_it_will_be_done(gang: Gang, clock: SetClock, ranks: SetRanks) -> None:
    await measured(gang, ranks)
    alone_s = NUM_STEPS * STEP_S
    jobs = [await opened(gang, shaped_job(name)) for name in "abc"]
    assert [eta_s for eta_s, _ in jobs] == pytest.approx([alone_s, 2 * alone_s, 3 * alone_s])
    await settled()
    begun_s = clock.now_s()
    for _ in range(3 * NUM_STEPS):
        await ranks.finish_step(STEP_S)
    assert clock.now_s() - begun_s == pytest.approx(3 * alone_s)
    left_s = [alone_s - STEP_S * step for step in range(1, NUM_STEPS + 1)]
    for _, stream in jobs:
        steps = [event async for group in stream for event in group if isinstance(event, StepDone)]
        assert [step.eta_s for step in steps] == pytest.approx(left_s, abs=STEP_S), "each is next once it has begun"


async def test_what_cannot_be_done_in_time_is_refused_at_once(gang: Gang, ranks: SetRanks) -> None:
    """A job lasts 0.5 s, and one is before it."""
    await measured(gang, ranks)
    before = asyncio.ensure_future(run(gang, shaped_job("before")))
    await settled()
    with pytest.raises(TooLateError, match=r"about 1\.0 s, and deadline_s is 0\.7") as caught:
        await opened(gang, shaped_job("late", deadline_s=0.7))
    assert caught.value.retry_after_s == pytest.approx(0.3, abs=STEP_S)
    with pytest.raises(ValueError, match=r"deadline_s is 0\.4, and the steps alone take 0\.5 s"):
        await opened(gang, shaped_job("never", deadline_s=0.4))
    in_time = asyncio.ensure_future(run(gang, shaped_job("in time", deadline_s=1.1)))
    for _ in range(2 * NUM_STEPS):
        await ranks.finish_step(STEP_S)
    ends = [events[-1] for events in await asyncio.gather(before, in_time)]
    assert [type(end) for end in ends] == [JobDone, JobDone]


async def test_while_nothing_was_measured_nothing_is_refused(gang: Gang, ranks: SetRanks) -> None:
    running = asyncio.ensure_future(run(gang, shaped_job("first", deadline_s=0.01)))
    await settled()
    for _ in range(NUM_STEPS):
        await ranks.finish_step(STEP_S)
    assert isinstance((await running)[-1], JobDone)
