"""Gangs break or fail to start: how that is detected, which callers get the error, and that nothing is left.

Deadlines pass only when the test advances the clock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray
from ray.exceptions import RayActorError

from engines.gang import driver
from engines.gang.errors import GangBrokenError
from engines.gang.gang import DEATH_WITHIN_S, Gang
from engines.gang.gang_config import GangConfig
from engines.gang.rank import kill_ranks
from tests.engines.gang.support.checks import assert_breaks_for_everyone, jobs_in_flight, warm_up
from tests.engines.gang.support.fakes import (
    FakeRequest,
    awaited,
    fake_job,
    load_fake,
    load_fake_failing_on_rank_1,
    reference_latents,
)
from tests.engines.gang.support.helpers import (
    alive,
    eventually,
    gang_of,
    group_for,
    latents,
    num_free_cpus,
    num_placement_groups,
    run,
)
from tests.engines.gang.support.set_clock import SetClock, settled

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, step_deadline_s=1.0, start_deadline_s=60.0, max_running_jobs=1)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def leaves_nothing(ray_cluster: None) -> AsyncIterator[None]:
    """Check that each test ends with no more resources in use than before; released ones may return late."""
    num_groups, num_cpus = num_placement_groups(), num_free_cpus()
    yield
    await eventually(lambda: num_placement_groups() <= num_groups and num_free_cpus() >= num_cpus)


async def pass_until_broken(gang: Gang, clock: SetClock) -> None:
    """Let deadlines pass one after the other until the gang is broken."""
    while gang.broken is None:
        await clock.advance(CONFIG.step_deadline_s)
        await asyncio.sleep(0.05)


async def test_kill_9_of_a_sleeping_rank_is_known_to_all() -> None:
    async with gang_of(CONFIG) as gang:
        await gang.sleep()
        waiting = asyncio.ensure_future(run(gang, fake_job("waiting", FakeRequest(seed=1, num_steps=2))))
        await settled()
        os.kill(gang.infos[1].pid, signal.SIGKILL)
        with pytest.raises(GangBrokenError, match="rank 1 died"):
            await waiting
        with pytest.raises(RayActorError):
            await gang.check_health()
        with pytest.raises(GangBrokenError, match="rank 1 died"):
            await gang.wake()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_kill_9_of_a_rank_is_known_to_all_jobs_before_any_deadline(victim: int) -> None:
    async with gang_of(CONFIG) as gang:
        tasks = await jobs_in_flight(gang, FakeRequest(seed=1, num_steps=1000, step_s=0.02), after_step=5)
        os.kill(gang.infos[victim].pid, signal.SIGKILL)
        reason = await assert_breaks_for_everyone(gang, tasks)
        assert reason.startswith(f"rank {victim} died"), reason


async def test_kill_9_of_an_idle_rank_is_known_without_a_health_check() -> None:
    async with gang_of(CONFIG, clock := SetClock()) as gang:
        breaks, waits = asyncio.ensure_future(gang.breaks_within(60.0)), asyncio.ensure_future(gang.breaks_within(1.0))
        await settled()
        await clock.advance(1.0)
        assert not await waits
        os.kill(gang.infos[1].pid, signal.SIGKILL)
        assert await breaks
        assert gang.broken is not None
        assert gang.broken.cause == "death"


HANGING = FakeRequest(seed=1, num_steps=9, fault="hang", fault_step=3, fault_rank=1)
"""Rank 0 is left alone in the exchange of step 3."""


async def test_a_hanging_rank_is_found_by_the_step_deadline_and_the_gang_is_unhealthy_whether_its_ranks_die_or_not(
    clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks stay in a step of the engine, and answer pings, until they are killed."""
    monkeypatch.setattr(driver, "kill_ranks", lambda ranks: None)
    async with gang_of(CONFIG, clock) as gang:
        await warm_up(gang)
        tasks = await jobs_in_flight(gang, HANGING, after_step=2)
        await clock.advance(CONFIG.step_deadline_s / 2)
        assert gang.broken is None
        await pass_until_broken(gang, clock)

        check = asyncio.ensure_future(gang.check_health())
        await settled()
        await clock.advance(DEATH_WITHIN_S / 2)
        assert not check.done()
        await clock.advance(DEATH_WITHIN_S)
        with pytest.raises(GangBrokenError, match="did not finish a step") as caught:  # the cause if no rank dies
            await check
        assert caught.value.cause == "deadline"

        kill_later(gang._ranks)
        reason = await assert_breaks_for_everyone(gang, tasks)
        assert re.fullmatch(r"ranks \[0, 1\] did not finish a step \(3 of job job.\) within 1 s", reason), reason


async def test_a_stopped_process_is_found_by_a_ping(clock: SetClock) -> None:
    async with gang_of(replace(CONFIG, ping_deadline_s=2.5), clock) as gang:
        os.kill(gang.infos[1].pid, signal.SIGSTOP)
        check = asyncio.ensure_future(gang.check_health())
        await settled()
        await clock.advance(2.4)
        assert gang.broken is None
        await clock.advance(0.1)
        with pytest.raises(RayActorError):
            await check
        assert gang.broken is not None
        await eventually(lambda: not alive(info.pid for info in gang.infos))


async def test_answers_that_come_while_the_event_loop_is_blocked_are_in_time(clock: SetClock) -> None:
    """Ray blocks the loop of a replica whose stream to a hanging caller has ended."""
    async with gang_of(replace(CONFIG, ping_deadline_s=2.5), clock) as gang:
        check = asyncio.ensure_future(gang.check_health())
        await asyncio.sleep(0)
        ray.get([rank.ping.remote() for rank in gang._ranks])  # each answers its pings in order
        await clock.advance(2.5)
        await check
        assert gang.broken is None


def kill_later(ranks: Sequence[Any]) -> None:
    """Kill the ranks late, as the news of a death may come late."""
    asyncio.get_running_loop().call_later(0.5, kill_ranks, ranks)


async def test_a_health_check_under_way_does_not_pass_when_the_gang_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "kill_ranks", kill_later)
    async with gang_of(CONFIG) as gang:
        os.kill(gang.infos[1].pid, signal.SIGSTOP)
        check = asyncio.ensure_future(gang.check_health())
        await asyncio.sleep(0.1)
        gang._driver.break_gang(GangBrokenError("the ranks disagree"))
        os.kill(gang.infos[1].pid, signal.SIGCONT)  # answers the ping now
        with pytest.raises(RayActorError):
            await check


async def test_an_engine_that_raises_breaks_the_gang_before_any_deadline() -> None:
    async with gang_of(CONFIG) as gang:
        request = FakeRequest(seed=1, num_steps=9, fault="error", fault_step=2, fault_rank=1)
        tasks = await jobs_in_flight(gang, request, after_step=1)
        reason = await assert_breaks_for_everyone(gang, tasks)
        assert gang.broken is not None
        assert gang.broken.cause == "error"
        assert reason == "rank 1 failed: RuntimeError: the engine is broken"


async def test_a_shape_has_the_start_deadline_until_a_step_found_it_warm_and_then_a_failure_of_one_rank_is_found(
    clock: SetClock, tmp_path: Path
) -> None:
    """A failure on one rank only does not fail the job: rank 0 waits for rank 1."""
    async with gang_of(CONFIG, clock) as gang:
        cold = FakeRequest(seed=1, num_steps=2, gate=str(tmp_path / "cold"))
        running = asyncio.ensure_future(run(gang, fake_job("cold", cold, shape="new")))
        await eventually(awaited(tmp_path / "cold").exists)
        await clock.advance(CONFIG.start_deadline_s / 2)
        (tmp_path / "cold").touch()
        await running
        half = FakeRequest(seed=1, num_steps=9, fault="value_error", fault_step=2, fault_rank=1)
        running = asyncio.ensure_future(run(gang, fake_job("half", half, shape="new")))
        await pass_until_broken(gang, clock)
        with pytest.raises(GangBrokenError, match="within 1 s"):
            await running


async def test_a_half_start_is_undone_and_closing_fails_open_jobs_and_releases_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No deadline passes: the start does not wait for rank 0, which is stuck."""
    request = FakeRequest(seed=1, num_steps=2)
    with group_for(CONFIG) as group:
        with pytest.raises(ValueError, match="no such checkpoint"):
            await Gang.start(CONFIG, load_fake_failing_on_rank_1, placement_group=group, clock=SetClock())
        gang = await Gang.start(CONFIG, load_fake, placement_group=group, clock=SetClock())  # the bundles are free
        assert (await latents(gang, fake_job("after", request))).equal(reference_latents(request))
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="engines.gang"):
            tasks = await jobs_in_flight(gang, FakeRequest(seed=1, num_steps=1000, step_s=0.01), after_step=1)
            await gang.close()
        await eventually(lambda: not alive(info.pid for info in gang.infos))
    assert {str(error) for error in await asyncio.gather(*tasks)} == {"the gang is closed"}
    assert [record for record in caplog.records if record.name.startswith("engines.gang")] == []


async def test_a_gang_without_a_placement_group_says_so() -> None:
    with pytest.raises(ValueError, match="placement_group_bundles"):
        await Gang.start(CONFIG, load_fake)
