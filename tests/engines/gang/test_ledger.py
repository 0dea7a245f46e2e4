"""What a gang learns from reports of its ranks, and what it does not."""

from __future__ import annotations

import asyncio

import pytest

from engines.gang import gang as gang_module
from engines.gang.config import GangConfig
from engines.gang.eta.step_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import JobFailure
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.set_clock import SetClock, SetRanks, settled

NUM_STEPS = 4


def shaped_job(name: str, shape: str) -> Job:
    return fake_job(name, FakeRequest(seed=1, num_steps=NUM_STEPS), shape=shape)


async def test_what_ranks_skip_of_a_job_that_failed_is_no_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second step was sent before the first one failed, and ends at once."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    clock, config, times = SetClock(), GangConfig(num_ranks=2, cpus_per_rank=0.1), StepTimes()
    ranks = SetRanks(config.num_ranks, clock)
    gang = Gang(config, ranks.actors, (), (config.num_ranks,), "publishing", clock, times)
    for name in ("one", "other"):
        failing = asyncio.ensure_future(run(gang, shaped_job(name, "refused")))
        await settled()
        failure = JobFailure(job_id=name, error=ValueError("too large"))
        await ranks.finish_step(0.05, predicted=False, failures=(failure,))
        for _ in ("its second", "the drop"):
            await ranks.finish_step(0.001, predicted=False)
        with pytest.raises(ValueError, match="too large"):
            await failing
    running = asyncio.ensure_future(run(gang, shaped_job("good", "fits")))
    await settled()
    for _ in range(NUM_STEPS):
        await ranks.finish_step(0.05)
    await running
    await gang.close()
    assert times.prediction().measured == {("'fits'", 2): pytest.approx(0.05)}
