"""A gang of two real ranks over Gloo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from ray.util.placement_group import placement_group, remove_placement_group

from engines.gang.config import GangConfig
from engines.gang.errors import QueueFullError
from engines.gang.gang import Gang
from engines.gang.job import Job, JobDone, JobEvent, PreviewReady, StepDone
from engines.gang.placement import gang_bundles, gang_strategy
from tests.engines.gang.fakes import FakeRequest, build_fake, fake_job, reference_latents

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, max_running_jobs=4, max_waiting_jobs=60, step_deadline_s=10.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gang(ray_cluster: None) -> AsyncIterator[Gang]:
    group = placement_group(gang_bundles(CONFIG, replica_cpus=0.1), strategy=gang_strategy(CONFIG))
    gang = await Gang.start(CONFIG, build_fake, placement_group=group)
    yield gang
    await gang.close()
    remove_placement_group(group)


async def run(gang: Gang, job: Job) -> list[JobEvent]:
    return [event async for event in gang.submit(job)]


async def latents(gang: Gang, job: Job) -> torch.Tensor:
    done = (await run(gang, job))[-1]
    assert isinstance(done, JobDone)
    return await done.latents


async def test_a_job_gives_its_steps_previews_and_latents(gang: Gang):
    request = FakeRequest(seed=1, num_steps=5)
    *events, done = await run(gang, fake_job("one", request, preview_steps=frozenset({2, 5})))
    assert [e.step for e in events if isinstance(e, StepDone)] == [1, 2, 3, 4, 5]
    assert {(e.num_steps, e.width) for e in events if isinstance(e, StepDone)} == {(5, 2)}
    (preview,) = [e for e in events if isinstance(e, PreviewReady)]
    assert preview.step == 2
    torch.testing.assert_close(
        await preview.latents, reference_latents(FakeRequest(seed=1, num_steps=2)), rtol=0, atol=0
    )
    assert isinstance(done, JobDone)
    torch.testing.assert_close(await done.latents, reference_latents(request), rtol=0, atol=0)


async def test_queue_full(gang: Gang):
    jobs = [asyncio.ensure_future(run(gang, fake_job(f"full{i}", FakeRequest(seed=i, num_steps=3)))) for i in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as caught:
        await run(gang, fake_job("too many", FakeRequest(seed=0, num_steps=1)))
    assert caught.value.num_waiting == 60
    await asyncio.gather(*jobs)
