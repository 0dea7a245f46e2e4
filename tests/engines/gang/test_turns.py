"""A rank on a GPU gets its next step by the clock, since no step under way will report."""

from __future__ import annotations

import asyncio

import pytest

from engines.gang import gang as gang_module
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.set_clock import SetClock, SetRanks, settled

CONFIG = GangConfig(num_ranks=1, cpus_per_rank=0.1, gpus_per_rank=1.0)
STEP_S, TICK_S = 0.4, 0.001


class RestlessClock(SetClock):
    """Advances by ``TICK_S`` with every look at it."""

    def now_s(self) -> float:
        self._now_s += TICK_S
        return self._now_s


@pytest.mark.parametrize("ticks", [step / 4 for step in range(16)])
async def test_a_rank_whose_turn_comes_between_two_looks_is_sent_its_step(
    ticks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    clock, step_times = RestlessClock(), StepTimes()
    ranks, job = SetRanks(1, clock), fake_job("alone", FakeRequest(seed=1, num_steps=4), shape=("steady",))
    for _ in range(2):
        step_times.hear_step(job, 1, STEP_S)
    assert step_times.changed()
    gang = Gang(CONFIG, ranks.actors, infos=(), team_sizes=(1,), model="timed", clock=clock, step_times=step_times)
    running = asyncio.ensure_future(run(gang, job))
    await settled()
    await ranks.finish_step(0.0)  # the step has begun
    assert ranks.num_sent == 0
    waits_s = gang._driver._ledger.next_free_in_s(CONFIG.plans_ahead, clock._now_s)
    assert waits_s is not None
    turn_s = clock._now_s + waits_s
    await clock.advance(turn_s - clock._now_s - (20 + ticks) * TICK_S)
    while clock._now_s < turn_s:
        assert ranks.num_sent == 0
        gang._driver._wake_schedule.set()
        await settled()
    await clock.advance(STEP_S)
    assert ranks.num_sent == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await gang.close()
