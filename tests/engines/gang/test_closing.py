"""A gang closes: its jobs fail and its ranks end."""

from __future__ import annotations

import asyncio

import pytest

from engines.gang import driver as driver_module
from engines.gang import gang as gang_module
from engines.gang.errors import GangBrokenError
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import JobDone, JobEvent
from tests.engines.gang.support.plans import job
from tests.engines.gang.support.set_clock import SetClock, SetRanks, remote, settled


async def test_ranks_end_also_where_nobody_waits_for_them_to_close_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica without time left to stop cancels the close."""
    killed = list[object]()
    monkeypatch.setattr(gang_module, "kill_ranks", killed.extend)
    clock = SetClock()
    ranks = SetRanks(2, clock).actors
    ranks[1].close = remote(lambda: asyncio.get_running_loop().create_future())
    gang = Gang(GangConfig(num_ranks=2), ranks, infos=(), team_sizes=(2,), model="cut short", clock=clock)
    closing = asyncio.ensure_future(gang.close())
    await settled()
    assert not killed
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert killed == ranks


async def test_a_second_close_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica ends after it, and would cut the first short."""
    killed = list[object]()
    monkeypatch.setattr(gang_module, "kill_ranks", killed.extend)
    clock = SetClock()
    ranks = SetRanks(2, clock).actors
    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ranks[1].close = remote(lambda: closed)
    gang = Gang(GangConfig(num_ranks=2), ranks, infos=(), team_sizes=(2,), model="twice", clock=clock)
    first, second = asyncio.ensure_future(gang.close()), asyncio.ensure_future(gang.close())
    await settled()
    assert not second.done()
    closed.set_result(None)
    await asyncio.gather(first, second)
    assert killed == ranks
    await gang.close()


async def test_a_gang_that_ends_finishes_what_has_begun_and_hands_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "kill_ranks", lambda ranks: None)
    clock = SetClock()
    ranks = SetRanks(2, clock)
    config = GangConfig(num_ranks=2, max_running_jobs=1, policy="arrival", plans_ahead=1)
    gang = Gang(config, ranks.actors, infos=(), team_sizes=(2,), model="ends", clock=clock)

    async def run(name: str) -> JobEvent:
        return [event async for group in gang.submit_grouped(job(name, 2), every_s=0.0) for event in group][-1]

    running, waiting = (asyncio.ensure_future(run(name)) for name in ("running", "waiting"))
    await settled()
    gang.hand_on()
    for refused in (waiting, run("new")):
        with pytest.raises(GangBrokenError) as error:
            await refused
        assert (error.value.cause, error.value.in_flight) == ("closed", False)
    while not running.done():
        await ranks.finish_step(1.0)
    assert isinstance(running.result(), JobDone)
    assert gang.demand().backlog_s == 0
    await gang.close()


async def test_a_broken_gang_still_reports_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in flight was the first of its shape, and Serve asks until it replaces the replica."""
    monkeypatch.setattr(driver_module, "kill_ranks", lambda ranks: None)
    clock = SetClock()
    ranks = SetRanks(2, clock).actors
    gang = Gang(GangConfig(num_ranks=2), ranks, infos=(), team_sizes=(2,), model="breaks", clock=clock)

    async def run() -> None:
        async for _ in gang.submit_grouped(job("new", 2), every_s=0.0):
            pass

    running = asyncio.ensure_future(run())
    await settled()
    gang._driver.break_gang(GangBrokenError("a rank died", "death"))
    with pytest.raises(GangBrokenError) as error:
        await running
    assert error.value.in_flight
    assert gang.open_work() == {}
    assert gang.report().num_jobs == 0
    assert gang.demand().backlog_s == 0
