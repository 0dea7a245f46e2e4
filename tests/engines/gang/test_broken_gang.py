"""Gangs that break, or never come up: how soon that is known, to whom, and that nothing is left."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from ray.exceptions import ActorDiedError

from engines.gang import driver
from engines.gang import gang as gang_module
from engines.gang.config import GangConfig
from engines.gang.errors import GangBrokenError
from engines.gang.gang import Gang
from engines.gang.rank import kill_ranks
from tests.engines.gang.support.fakes import (
    FakeRequest,
    build_fake,
    build_fake_failing_on_rank_1,
    fake_job,
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

pytestmark = pytest.mark.asyncio(loop_scope="module")

PING_S = 1.0
CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, step_deadline_s=1.0, start_deadline_s=60.0, max_running_jobs=1)


@pytest.fixture(autouse=True)
def pings_are_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "PING_DEADLINE_S", PING_S)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def leaves_nothing(ray_cluster: None) -> AsyncIterator[None]:
    before = num_placement_groups(), num_free_cpus()
    yield
    await eventually(lambda: (num_placement_groups(), num_free_cpus()) == before)


async def outcome_of(gang: Gang, job_id: str, request: FakeRequest) -> tuple[BaseException, float]:
    """What a job ends with, and when."""
    try:
        await run(gang, fake_job(job_id, request, shape="shape"))
    except GangBrokenError as error:
        return error, time.monotonic()
    raise AssertionError("the job ended well")


async def assert_breaks_for_everyone(gang: Gang, tasks: list[asyncio.Task[tuple[BaseException, float]]]) -> str:
    """All open jobs, health checks and later jobs learn of it; no process is left. The reason."""
    errors = [error for error, _ in await asyncio.gather(*tasks)]
    assert [error.in_flight for error in errors].count(True) == 1, "the others merely waited"
    assert len({error.reason for error in errors}) == 1
    with pytest.raises(ActorDiedError):
        await asyncio.wait_for(gang.check_health(), timeout=3.0)
    with pytest.raises(GangBrokenError, match="rank"):
        await run(gang, fake_job("late", FakeRequest(seed=1, num_steps=2)))
    await eventually(lambda: not alive(info.pid for info in gang.infos), within_s=3.0)
    return errors[0].reason


def start_jobs(gang: Gang, request: FakeRequest) -> list[asyncio.Task[tuple[BaseException, float]]]:
    """One job that runs and two that wait."""
    return [asyncio.ensure_future(outcome_of(gang, f"job{i}", request)) for i in range(3)]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_kill_9_of_a_rank_is_known_to_all_jobs_at_once(victim: int):
    async with gang_of(CONFIG) as gang:
        tasks = start_jobs(gang, FakeRequest(seed=1, num_steps=1000, step_s=0.02))
        await asyncio.sleep(0.5)
        killed_s = time.monotonic()
        os.kill(gang.infos[victim].pid, signal.SIGKILL)
        reason = await assert_breaks_for_everyone(gang, tasks)
        assert max(task.result()[1] for task in tasks) - killed_s < 2.0
        assert reason.startswith(f"rank {victim} died"), reason


async def test_kill_9_of_an_idle_rank_is_known_without_a_health_check():
    async with gang_of(CONFIG) as gang:
        os.kill(gang.infos[1].pid, signal.SIGKILL)
        await eventually(lambda: gang.broken is not None, within_s=2.0)
        assert gang.broken is not None
        assert gang.broken.cause == "death"


async def test_a_hanging_rank_is_found_by_the_step_deadline():
    async with gang_of(CONFIG) as gang:
        warm = FakeRequest(seed=2, num_steps=2)
        await run(gang, fake_job("warm", warm, shape="shape"))
        started_s = time.monotonic()
        hanging = FakeRequest(seed=1, num_steps=9, fault="hang", fault_step=3, fault_rank=1)
        reason = await assert_breaks_for_everyone(gang, start_jobs(gang, hanging))
        assert time.monotonic() - started_s < 1.0 + 3.0
        assert re.fullmatch(r"ranks \[0, 1\] did not finish a step \(3 of job job.\) within 1 s", reason), reason


async def test_a_stopped_process_is_found_by_a_ping():
    async with gang_of(CONFIG) as gang:
        os.kill(gang.infos[1].pid, signal.SIGSTOP)
        with pytest.raises(ActorDiedError):
            await gang.check_health()
        assert gang.broken is not None
        await eventually(lambda: not alive(info.pid for info in gang.infos))


async def break_by_hanging(gang: Gang) -> None:
    """Both ranks stay in a step of the engine, and answer pings."""
    await run(gang, fake_job("warm", FakeRequest(seed=2, num_steps=2), shape="shape"))
    await outcome_of(gang, "hanging", FakeRequest(seed=1, num_steps=9, fault="hang", fault_step=3, fault_rank=1))


def kill_later(ranks: Sequence[Any]) -> None:
    """As slow as the news of a death can be."""
    asyncio.get_running_loop().call_later(0.5, kill_ranks, ranks)


async def test_a_broken_gang_is_unhealthy_while_its_ranks_still_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "kill_ranks", kill_later)
    async with gang_of(CONFIG) as gang:
        await break_by_hanging(gang)
        with pytest.raises(ActorDiedError):
            await gang.check_health()


async def test_a_health_check_under_way_does_not_pass_when_the_gang_breaks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "kill_ranks", kill_later)
    async with gang_of(CONFIG) as gang:
        os.kill(gang.infos[1].pid, signal.SIGSTOP)
        check = asyncio.ensure_future(gang.check_health())
        await asyncio.sleep(0.1)
        gang._driver.break_gang(GangBrokenError("the ranks disagree"))
        os.kill(gang.infos[1].pid, signal.SIGCONT)  # answers the ping now
        with pytest.raises(ActorDiedError):
            await check


async def test_a_broken_gang_whose_ranks_do_not_die_says_why_it_broke(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "kill_ranks", lambda ranks: None)
    async with gang_of(CONFIG) as gang:
        await break_by_hanging(gang)
        started_s = time.monotonic()
        with pytest.raises(GangBrokenError, match="did not finish a step") as caught:
            await gang.check_health()
        assert caught.value.cause == "deadline"
        assert PING_S <= time.monotonic() - started_s < PING_S + 1.0
        kill_ranks(gang._ranks)


async def test_an_engine_that_raises_breaks_the_gang():
    async with gang_of(CONFIG) as gang:
        request = FakeRequest(seed=1, num_steps=9, fault="error", fault_step=2, fault_rank=1)
        reason = await assert_breaks_for_everyone(gang, start_jobs(gang, request))
        assert gang.broken is not None
        assert gang.broken.cause == "error"
        assert reason == "rank 1 failed: RuntimeError: the engine is broken"


async def test_a_failure_on_one_rank_only_is_no_failure_of_the_job():
    async with gang_of(CONFIG) as gang:
        request = FakeRequest(seed=1, num_steps=9, fault="value_error", fault_step=2, fault_rank=1)
        await run(gang, fake_job("warm", FakeRequest(seed=2, num_steps=2), shape="shape"))
        with pytest.raises(GangBrokenError):
            await run(gang, fake_job("half", request, shape="shape"))


async def test_a_shape_has_the_start_deadline_until_a_step_found_it_warm():
    async with gang_of(CONFIG) as gang:
        slow = FakeRequest(seed=1, num_steps=2, step_s=1.5)
        await run(gang, fake_job("cold", slow, shape="new"))
        with pytest.raises(GangBrokenError, match="within 1 s"):
            await run(gang, fake_job("warm", slow, shape="new"))


async def test_closing_fails_open_jobs_and_releases_in_order(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="engines.gang"):
        async with gang_of(CONFIG) as gang:
            task = asyncio.ensure_future(outcome_of(gang, "open", FakeRequest(seed=1, num_steps=1000, step_s=0.01)))
            await asyncio.sleep(0.3)
    error, _ = await task
    assert str(error) == "the gang is closed"
    assert [record for record in caplog.records if record.name.startswith("engines.gang")] == []


async def test_a_half_start_is_undone():
    request = FakeRequest(seed=1, num_steps=2)
    with group_for(CONFIG) as group:
        started_s = time.monotonic()
        with pytest.raises(ValueError, match="no such checkpoint"):
            await Gang.start(CONFIG, build_fake_failing_on_rank_1, placement_group=group)
        assert time.monotonic() - started_s < CONFIG.start_deadline_s / 2, "rank 0, stuck, is not waited for"
        gang = await Gang.start(CONFIG, build_fake, placement_group=group)  # its bundles are free again
        assert (await latents(gang, fake_job("after", request))).equal(reference_latents(request))
        await gang.close()


async def test_a_gang_without_a_placement_group_says_so():
    with pytest.raises(ValueError, match="placement_group_bundles"):
        await Gang.start(CONFIG, build_fake)
