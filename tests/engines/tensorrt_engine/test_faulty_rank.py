"""A rank that does not enqueue leaves the others inside a collective for ever, so the gang ends them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

from engines.gang.errors import GangBrokenError
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobDone
from tests.engines.gang.support.checks import outcome_of
from tests.engines.gang.support.helpers import alive, eventually, group_for, submit
from tests.engines.gang.support.set_clock import SetClock
from tests.engines.tensorrt_engine.support.faulty_rank import NUM_STEPS, LoadFaulty
from tests.engines.tensorrt_engine.support.zoo import reference, wan_inputs, wan_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1)


def job(name: str) -> Job:
    return Job(job_id=name, request=0, conditioning=None, num_steps=NUM_STEPS, shape="shape")


async def latents(gang: Gang, name: str) -> torch.Tensor:
    *_, done = [event async for event in submit(gang, job(name))]
    assert isinstance(done, JobDone)
    made: torch.Tensor = done.latents.open()
    return made


def expected() -> torch.Tensor:
    model, inputs = wan_model(), wan_inputs(1, 3, 6, 10)
    for _ in range(NUM_STEPS):
        inputs["hidden_states"] = inputs["hidden_states"] - 0.1 * reference(model, inputs)
    return inputs["hidden_states"]


async def after_a_step(gang: Gang, name: str) -> asyncio.Task[GangBrokenError]:
    """Return a job's coming error once one of its steps is done."""
    steps: list[int] = []
    task = asyncio.ensure_future(outcome_of(gang, job(name), steps))
    await eventually(lambda: steps)
    return task


@pytest.mark.slow  # every run has both halves: the runtime's error, and a rank whose engine raises
async def test_a_rank_that_cannot_enqueue_breaks_the_gang_before_any_deadline(
    ray_cluster: None, tmp_path: Path
) -> None:
    with group_for(CONFIG) as group:
        build = LoadFaulty(folder=tmp_path, fault="refuses")
        gang = await Gang.start(CONFIG, build, placement_group=group, clock=SetClock())
        await latents(gang, "warm")
        error = await (await after_a_step(gang, "refuses"))
        assert re.match("rank 1 failed: .*could not enqueue the step", error.reason)
        assert (error.cause, error.in_flight) == ("error", True)
        await eventually(lambda: not alive(info.pid for info in gang.infos))


@pytest.mark.slow
async def test_a_rank_that_hangs_as_it_enqueues_breaks_the_gang_at_the_deadline(
    ray_cluster: None, tmp_path: Path
) -> None:
    clock = SetClock()
    with group_for(CONFIG) as group:
        build = LoadFaulty(folder=tmp_path, fault="hangs")
        gang = await Gang.start(CONFIG, build, placement_group=group, clock=clock)
        await latents(gang, "warm")  # from here on a step has its own deadline, not that of a first one
        broken = await after_a_step(gang, "hangs")
        while not broken.done():
            await clock.advance(CONFIG.step_deadline_s)
            await asyncio.sleep(0.05)
        error = await broken
        deadline = f"within {CONFIG.step_deadline_s:g} s"
        assert re.match(rf"ranks \[0, 1\] did not finish a step \(2 of job hangs\) {deadline}", error.reason)
        assert (error.cause, error.in_flight) == ("deadline", True)
        await eventually(lambda: not alive(info.pid for info in gang.infos))


@pytest.mark.slow
async def test_the_gang_after_a_broken_one_is_right(ray_cluster: None, tmp_path: Path) -> None:
    with group_for(CONFIG) as group:
        gang = await Gang.start(CONFIG, LoadFaulty(folder=tmp_path, fault="refuses"), placement_group=group)
        await latents(gang, "warm")
        with pytest.raises(GangBrokenError):
            await latents(gang, "refuses")
        again = await Gang.start(CONFIG, LoadFaulty(folder=tmp_path), placement_group=group)
        given = await latents(again, "again")
        await again.close()
    torch.testing.assert_close(given, expected(), rtol=1e-4, atol=1e-4)
