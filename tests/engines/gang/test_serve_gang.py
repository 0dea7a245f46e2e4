"""A gang runs in a Serve replica's placement group; Serve cancels, replaces and cleans up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray
import torch
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from engines.gang.errors import GangBrokenError
from engines.gang.jobs.job import Job, JobDone, Progress
from tests.engines.gang.support.fakes import FakeRequest, fake_job, reference_latents
from tests.engines.gang.support.helpers import alive, eventually, num_placement_groups
from tests.engines.gang.support.serve_app import gang_app
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def handle(ray_cluster: None) -> Iterator[DeploymentHandle[Any]]:
    num_before = num_placement_groups()
    serve.start(proxy_location=ProxyLocation.Disabled)
    handle = serve.run(gang_app(), name="gang", route_prefix=None)
    pids = handle.pids.remote().result()
    yield handle
    serve.delete("gang")
    asyncio.run(eventually(lambda: not alive(pids)))
    asyncio.run(eventually(lambda: num_placement_groups() <= num_before))
    serve.shutdown()  # type: ignore[no-untyped-call]


def events_of(handle: DeploymentHandle[Any], job: Job) -> DeploymentResponseGenerator[Any]:
    return cast("DeploymentResponseGenerator[Any]", handle.options(stream=True).denoise.remote(job))


async def latents(handle: DeploymentHandle[Any], job: Job) -> torch.Tensor:
    async for event in events_of(handle, job):
        last = event
    assert isinstance(last, JobDone)
    opened: torch.Tensor = last.latents.open()
    return opened


async def assert_serves(handle: DeploymentHandle[Any], job_id: str) -> None:
    request = FakeRequest(seed=7, num_steps=4)
    assert (await latents(handle, fake_job(job_id, request))).equal(reference_latents(request))


async def assert_serves_again(handle: DeploymentHandle[Any], job_id: str) -> None:
    """Retry for minutes until a job succeeds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await assert_serves(handle, job_id)
            except (GangBrokenError, ray.exceptions.RayActorError):
                await asyncio.sleep(0.1)


async def break_during_a_job(handle: DeploymentHandle[Any], pid: int) -> BaseException:
    """Kill the process with SIGKILL just before one rank hangs and leaves the other alone. Return the job's error."""
    job = fake_job("victim", FakeRequest(seed=1, num_steps=1000, step_s=0.05, fault="hang", fault_step=5, fault_rank=1))
    try:
        async for event in events_of(handle, job):
            if isinstance(event, Progress) and event.step == 3:
                os.kill(pid, signal.SIGKILL)
    except (GangBrokenError, ray.exceptions.RayActorError) as error:
        return error
    raise AssertionError("the job ended well")


async def test_large_latents_and_conditioning_pass_by_reference(handle: DeploymentHandle[Any]) -> None:
    conditioning_L = torch.linspace(-1, 1, 200_000)
    request = FakeRequest(seed=2, num_steps=2)
    job = fake_job("large", request, conditioning=ray.put(conditioning_L))
    result = await latents(handle, job)
    assert result.equal(reference_latents(request, conditioning_L))


@pytest.mark.slow  # test_gang.py drops jobs as well, and tests/end_to_end streams of clients
async def test_dropped_streams_leave_the_others_and_the_ranks_unharmed(handle: DeploymentHandle[Any]) -> None:
    rng = random.Random(1)
    requests = [FakeRequest(seed=i, num_steps=rng.randint(3, 12), step_s=0.002) for i in range(30)]

    async def keep(i: int) -> None:
        await asyncio.sleep(rng.random())
        result = await latents(handle, fake_job(f"kept{i}", requests[i]))
        assert result.equal(reference_latents(requests[i]))

    async def drop(i: int) -> None:
        await asyncio.sleep(rng.random())
        stream = events_of(handle, fake_job(f"dropped{i}", requests[i]))
        await asyncio.sleep(rng.random() / 2)
        stream.cancel()  # type: ignore[no-untyped-call]

    pids = await handle.pids.remote()
    await asyncio.gather(*(keep(i) if i % 2 else drop(i) for i in range(30)))
    await assert_serves(handle, "after the storm")
    assert await handle.pids.remote() == pids, "the same gang all along"
    async with asyncio.timeout(PATIENCE_S):
        while await handle.held_jobs.remote() != [(), ()]:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "victim",
    [pytest.param("replica", marks=pytest.mark.slow), "rank 0", pytest.param("rank 1", marks=pytest.mark.slow)],
)
async def test_serve_replaces_a_broken_gang(handle: DeploymentHandle[Any], victim: str) -> None:
    pids = dict(zip(("replica", "rank 0", "rank 1"), await handle.pids.remote(), strict=True))
    num_before = num_placement_groups()
    error = await break_during_a_job(handle, pids[victim])
    assert victim == "replica" or f"{victim} died" in str(error), "no deadline passed"
    await assert_serves_again(handle, f"again after {victim}")
    await eventually(lambda: not alive(pids.values()))
    await eventually(lambda: num_placement_groups() <= num_before)
