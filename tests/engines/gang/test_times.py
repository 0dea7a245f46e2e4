"""When a gang says what, by a clock that the test sets; its ranks' steps last as long as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.gang import gang as gang_module
from engines.gang.config import GangConfig
from engines.gang.gang import Gang
from engines.gang.job import JobDone, JobEvent, PreviewReady, StepDone
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
