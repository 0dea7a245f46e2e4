"""Checks that the gang's tests share."""

from __future__ import annotations

import asyncio

import pytest
import torch
from prometheus_client import REGISTRY
from ray.exceptions import RayActorError

from engines.gang.errors import GangBrokenError
from engines.gang.gang import Gang
from engines.gang.jobs.job import Job, Progress
from tests.engines.gang.support.fakes import FakeRequest, fake_job, reference_latents
from tests.engines.gang.support.helpers import alive, eventually, held_jobs, latents, run, submit
from tests.support.patience import PATIENCE_S

Outcomes = list[asyncio.Task[GangBrokenError]]


def assert_equal(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


async def assert_unharmed(gang: Gang, job_id: str) -> None:
    """Check that the next job equals its reference and the ranks hold nothing when it is done."""
    request = FakeRequest(seed=7, num_steps=4)
    assert_equal(await latents(gang, fake_job(job_id, request)), reference_latents(request))
    async with asyncio.timeout(PATIENCE_S):
        while await held_jobs(gang) != [(), ()]:
            await asyncio.sleep(0.05)


def metric(name: str, **labels: str) -> float:
    """Return this process's count under ``name``, or 0."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def warm_up(gang: Gang) -> None:
    await run(gang, fake_job("warm", FakeRequest(seed=2, num_steps=2), shape="shape"))


async def outcome_of(gang: Gang, job: Job, steps: list[int]) -> GangBrokenError:
    """Return the error that the job ends with. Append the steps done meanwhile to ``steps``."""
    try:
        async for event in submit(gang, job):
            assert isinstance(event, Progress), "the job ended well"
            steps.append(event.step)
    except GangBrokenError as error:
        return error
    raise AssertionError("the job ended")


async def jobs_in_flight(gang: Gang, request: FakeRequest, *, after_step: int) -> Outcomes:
    """Start three jobs. Return them when one has done ``after_step`` and two wait."""
    steps: list[int] = []
    jobs = [fake_job(f"job{i}", request, shape="shape") for i in range(3)]
    tasks = [asyncio.ensure_future(outcome_of(gang, job, steps)) for job in jobs]
    await eventually(lambda: after_step in steps)
    return tasks


async def assert_breaks_for_everyone(gang: Gang, tasks: Outcomes) -> str:
    """Check that all open jobs, health checks and later jobs fail and no process is left. Return the reason."""
    errors = await asyncio.gather(*tasks)
    assert [error.in_flight for error in errors].count(True) == 1, "the others merely waited"
    assert len({error.reason for error in errors}) == 1
    with pytest.raises(RayActorError):
        await gang.check_health()
    with pytest.raises(GangBrokenError, match="rank"):
        await run(gang, fake_job("late", FakeRequest(seed=1, num_steps=2)))
    await eventually(lambda: not alive(info.pid for info in gang.infos))
    return errors[0].reason
