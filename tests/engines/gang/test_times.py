"""A gang sends its events at the right times, by a clock and step times that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engines.gang import gang as gang_module
from engines.gang.errors import TooLateError
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobDone, JobEvent, JobQueued, PreviewReady, Progress
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
    """A step lasts 13 ms and a group at least 100: a group holds 8 steps, except the first step and other events."""
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
    last_steps = [max(event.step for event in group if isinstance(event, Progress)) for _, group in groups]
    assert [event.step for _, group in groups for event in group if isinstance(event, Progress)] == [*range(1, 41)]
    assert last_steps == [1, 8, 16, 20, 27, 35, 40]
    assert [came_s for came_s, _ in groups] == pytest.approx([0.013, 0.113, 0.213, 0.260, 0.360, 0.460, 0.520])
    others = [
        (index, event) for index, (_, group) in enumerate(groups) for event in group if type(event) is not Progress
    ]
    assert [(index, type(event)) for index, event in others] == [(3, PreviewReady), (6, JobDone)]
    assert all(type(event) is Progress for _, group in groups for event in group[:-1])


async def test_times_are_told_apart(gang: Gang, ranks: SetRanks) -> None:
    """The second of two equal jobs waits for all ten steps of the first."""
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


@pytest.mark.parametrize("elastic", [False, True])
async def test_an_elastic_gang_says_what_it_cannot_promise(
    clock: SetClock, ranks: SetRanks, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """This includes a job that ran on all ranks: the next time others may come between."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    config = replace(CONFIG, elastic=elastic)
    gang = Gang(config, ranks.actors, infos=(), team_sizes=(1, CONFIG.num_ranks), model="timed", clock=clock)
    running = asyncio.ensure_future(run(gang, fake_job("a", FakeRequest(seed=1, num_steps=1))))
    await settled()
    await ranks.finish_step(0.1)
    done = (await running)[-1]
    await gang.close()
    assert isinstance(done, JobDone)
    assert done.same_bytes is not elastic


STEP_S = 0.05
NUM_STEPS = 10


def shaped_job(name: str, **fields: object) -> Job:
    return fake_job(name, FakeRequest(seed=1, num_steps=NUM_STEPS), **{"shape": "square"} | fields)


async def measured(gang: Gang, ranks: SetRanks) -> None:
    """Run a job, so that the gang knows its step time."""
    running = asyncio.ensure_future(run(gang, shaped_job("first")))
    await settled()
    for _ in range(NUM_STEPS):
        await ranks.finish_step(STEP_S)
    await running


async def opened(gang: Gang, job: Job) -> tuple[float | None, AsyncGenerator[tuple[JobEvent, ...]]]:
    """Return the predicted seconds that a job gets on arrival, and its further events."""
    stream = gang.submit_grouped(job, every_s=0.0)
    (queued,) = await anext(stream)
    assert isinstance(queued, JobQueued)
    return queued.eta_s, stream


async def test_a_job_is_told_how_many_are_before_it(gang: Gang) -> None:
    streams = [gang.submit_grouped(shaped_job(name), every_s=0.0) for name in "abc"]
    queued = [event for stream in streams for event in await anext(stream) if isinstance(event, JobQueued)]
    assert [event.num_before for event in queued] == [0, 1, 2]
    for stream in streams:
        await stream.aclose()


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
        steps = [event async for group in stream for event in group if isinstance(event, Progress)]
        assert [step.eta_s for step in steps] == pytest.approx(left_s, abs=STEP_S), "each is next once it has begun"


async def test_what_cannot_be_done_in_time_is_refused_at_once(gang: Gang, ranks: SetRanks) -> None:
    """A job lasts 0.5 s, and one is ahead of it."""
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


async def test_while_nothing_was_measured_nothing_is_said_nor_refused(gang: Gang, ranks: SetRanks) -> None:
    """The second job gets a prediction once the first has shown how long a step takes."""
    jobs = [await opened(gang, shaped_job(name, deadline_s=0.01)) for name in ("first", "second")]
    assert [eta_s for eta_s, _ in jobs] == [None, None]
    await settled()
    for _ in range(2 * NUM_STEPS):
        await ranks.finish_step(STEP_S)
    first, second = [
        [event.eta_s async for group in stream for event in group if isinstance(event, Progress)] for _, stream in jobs
    ]
    assert first == [*[None] * (NUM_STEPS - 1), 0.0]
    assert second == pytest.approx([STEP_S * (NUM_STEPS - step) for step in range(1, NUM_STEPS + 1)], abs=STEP_S)


async def test_a_first_job_that_is_alone_is_told_by_its_own_steps(gang: Gang, ranks: SetRanks) -> None:
    """A cold step does not count."""
    eta_s, stream = await opened(gang, shaped_job("first"))
    assert eta_s is None
    await settled()
    await ranks.finish_step(20 * STEP_S, was_warm=False)
    for _ in range(NUM_STEPS - 1):
        await ranks.finish_step(STEP_S)
    steps = [event.eta_s async for group in stream for event in group if isinstance(event, Progress)]
    assert steps[0] is None
    assert steps[1:] == pytest.approx([STEP_S * (NUM_STEPS - step) for step in range(2, NUM_STEPS + 1)])


def guess(estimate_s: float) -> dict[str, Any]:
    """Return the fields of a job of another shape with this estimate."""
    return {"shape": f"of {estimate_s}", "estimates_s": {1: estimate_s}}


async def test_a_guess_is_neither_said_nor_held_against_anybody(gang: Gang, ranks: SetRanks) -> None:
    """A step estimated at a hundred times the measured one gives no prediction, for this job or those behind it. One of
    four times is near enough."""
    running = asyncio.ensure_future(run(gang, shaped_job("measured", estimates_s={1: 0.001})))
    await settled()
    for _ in range(NUM_STEPS):
        await ranks.finish_step(STEP_S)
    await running
    near_s, near = await opened(gang, shaped_job("near", **guess(0.004)))
    assert near_s == pytest.approx(4 * NUM_STEPS * STEP_S)
    with pytest.raises(ValueError, match=r"deadline_s is 1, and the steps alone take 2 s"):
        await opened(gang, shaped_job("never", **guess(0.004), deadline_s=1.0))
    far_s, far = await opened(gang, shaped_job("far", **guess(0.1), deadline_s=0.01))
    known_s, known = await opened(gang, shaped_job("known", deadline_s=NUM_STEPS * STEP_S + 0.01))
    assert (far_s, known_s) == (None, None)
    for stream in (near, far, known):
        await stream.aclose()
    await settled()


async def test_a_deadline_counts_from_when_the_request_came(gang: Gang, ranks: SetRanks) -> None:
    """A job takes 0.5 s. It is late after 0.6 of 1.0 s elsewhere; after more it is always late."""
    with pytest.raises(TooLateError, match=r"about 1\.2 s, and deadline_s is 1"):
        await opened(gang, shaped_job("over", deadline_s=1.0, waited_s=1.2))
    await measured(gang, ranks)
    with pytest.raises(TooLateError, match=r"about 1\.1 s, and deadline_s is 1"):
        await opened(gang, shaped_job("late", deadline_s=1.0, waited_s=0.6))
    eta_s, stream = await opened(gang, shaped_job("in time", deadline_s=1.0, waited_s=0.4))
    assert eta_s == pytest.approx(0.5)
    await stream.aclose()
    await settled()


async def test_the_next_of_long_steps_is_sent_shortly_before_its_turn(
    gang: Gang, clock: SetClock, ranks: SetRanks
) -> None:
    """A job that arrives while a step of four seconds runs waits for that step alone."""
    for name, most in (("first", 2), ("second", 1)):
        running = asyncio.ensure_future(run(gang, fake_job(name, FakeRequest(seed=1, num_steps=5), shape=("long",))))
        await settled()
        for step in range(1, 6):
            assert ranks.num_sent == (most if step < 5 else 1), f"{name}, step {step}: steps are not known at first"
            if most == 1 and step < 5:
                await clock.advance(2.9)
                assert ranks.num_sent == 1
                await clock.advance(0.2)
                assert ranks.num_sent == 2
                await ranks.finish_step(0.9)
            else:
                await ranks.finish_step(4.0)
        await running


async def test_the_time_asleep_is_that_of_no_step(
    gang: Gang, clock: SetClock, ranks: SetRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take 0.1 s, and some of them run before the gang sleeps for an hour."""
    heard_s: list[float] = []
    monkeypatch.setattr(gang._driver._step_times, "hear_step", lambda job, size, step_s: heard_s.append(step_s))
    running = asyncio.ensure_future(run(gang, shaped_job("napping", num_steps=8)))
    await settled()
    await ranks.finish_step(0.1)
    falling_asleep = asyncio.ensure_future(gang.sleep())
    while ranks.num_sent:
        await ranks.finish_step(0.1)
    await falling_asleep
    await clock.advance(3600)
    assert ranks.num_sent == 0
    assert gang.demand().backlog_s > 0
    await gang.wake()
    await settled()
    while not running.done():
        await ranks.finish_step(0.1)
    assert len(heard_s) > 2
    assert heard_s == pytest.approx([0.1] * len(heard_s))
