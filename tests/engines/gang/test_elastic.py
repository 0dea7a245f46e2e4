"""An elastic gang of four real ranks over Gloo has teams that follow the load, batches, and warm shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import USUAL_MOVE_S
from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import JobDone, Progress
from tests.engines.gang.support.checks import assert_equal
from tests.engines.gang.support.fakes import FakeRequest, fake_job, reference_latents
from tests.engines.gang.support.helpers import gang_of, run, submit

HARDLY_FASTER = {1: 1.0, 2: 0.95, 4: 0.94}
"""Estimated step times by team size: it pays to run jobs side by side."""


LEARNED = StepTimes()


class InPairs(GangConfig):
    """Batches two jobs, like a pipeline of two stages."""

    @property
    def max_batch(self) -> int:
        return 2


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four(ray_cluster: None) -> AsyncIterator[Gang]:
    """Start an elastic gang of four ranks with batches of two."""
    config = InPairs(num_ranks=4, cpus_per_rank=0.1, max_running_jobs=6, elastic=True)
    async with gang_of(config, step_times=LEARNED) as gang:
        yield gang
        assert gang.broken is None


async def test_teams_shrink_and_grow_as_jobs_come_and_go(four: Gang) -> None:
    """The state is large: a rank without it could not guess it. Six jobs fit four ranks in batches of two.

    Each job arrives two steps of the first one after the job before it.
    """
    conditioning_L = torch.linspace(-1, 1, 50_000)
    requests = [FakeRequest(seed=i, num_steps=n, step_s=0.02) for i, n in enumerate((40, 12, 8, 6, 5, 5))]

    its_turn = {2 * i: asyncio.Event() for i in range(len(requests))}
    its_turn[0].set()

    async def follow(i: int) -> tuple[set[int], torch.Tensor]:
        await its_turn[2 * i].wait()
        team_sizes = set()
        job = fake_job(
            f"elastic{i}", requests[i], conditioning=conditioning_L, shape="large", estimates_s=HARDLY_FASTER
        )
        async for event in submit(four, job):
            if isinstance(event, Progress):
                team_sizes.add(event.num_ranks)
                if i == 0 and event.step in its_turn:
                    its_turn[event.step].set()
        assert isinstance(event, JobDone)
        return team_sizes, event.latents.open()

    results = await asyncio.gather(*(follow(i) for i in range(len(requests))))
    assert results[0][0] == {4, 2, 1}
    assert LEARNED.prediction().move_s != USUAL_MOVE_S, "it was measured"
    for request, (_, result) in zip(requests, results, strict=True):
        assert_equal(result, reference_latents(request, conditioning_L))


async def test_a_job_says_whether_its_shape_was_warm(four: Gang) -> None:
    async def was_warm(name: str, length: int) -> bool:
        conditioning_L = torch.linspace(-1, 1, length)
        job = fake_job(name, FakeRequest(seed=1, num_steps=3), conditioning=conditioning_L, shape=length)
        done = (await run(four, job))[-1]
        assert isinstance(done, JobDone)
        return done.was_warm

    assert [await was_warm(f"warm{i}", length) for i, length in enumerate((77, 77, 78, 77))] == [
        False,
        True,
        False,
        True,
    ]
