"""Requests wait for a gang: their number and time are limited, and none is refused afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.service.flow import DeployedService, QueueLimits
from deployments.service.interface import Media, Output, ServiceEvent
from deployments.service.readiness import Readiness
from deployments.service.retries import HELD_S
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.jobs.job import JobDone, Progress
from tests.deployments.service.support.set_stages import Stages
from tests.deployments.support.fake_service import PICTURES
from tests.support.patience import PATIENCE_S

STEP = Progress(job_id="j", step=1, num_steps=1, num_ranks=2)
DONE = JobDone(job_id="j", latents="latents", queue_s=0.0, denoise_s=1.0, was_warm=True)  # type: ignore[arg-type]
BROKEN = GangBrokenError("rank 1 died", "death", in_flight=True)
FULL = QueueFullError(4, 1.0)

pytestmark = pytest.mark.usefixtures("no_pause")


async def test_a_request_that_was_kept_waiting_for_a_replica_is_refused_by_none(
    perform: Callable[[Stages], Any],
) -> None:
    """It came before the loss of the gang was known, and the next gang is full."""
    stages = Stages([FULL], [STEP, DONE])
    stages.taken_after_s = HELD_S + 0.1
    assert isinstance(await perform(stages), Media)
    assert [args[5] for args in stages.all_sent["denoise"]] == [False, True]


async def test_what_lost_its_gang_is_refused_by_none(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([STEP, BROKEN], [STEP, DONE])
    assert isinstance(await perform(stages), Media)
    assert [args[5] for args in stages.all_sent["denoise"]] == [False, True]


class Rebuilt(Readiness):
    """The gang of each model is lost, and will return in 30 s."""

    def is_bare(self, model: str) -> bool:
        return True

    def is_rebuilt(self, model: str) -> bool:
        return True

    def retry_after_s(self, model: str) -> float:
        return 30.0


def rebuilt(stages: Stages, **limits: Any) -> DeployedService:
    asked = {"m": QueueLimits(**limits)}
    return DeployedService({}, {"m": stages}, Rebuilt({"m": ()}), limits=asked)  # type: ignore[dict-item]


async def test_what_waits_for_a_gang_counts_before_it_is_accepted() -> None:
    """Two may wait: the third is refused at once with a time to retry, and the others are accepted for certain."""
    comes = asyncio.Event()
    stages = Stages([comes, STEP, DONE])
    service, request = rebuilt(stages, max_jobs=2), PICTURES.request(model="m", prompt="a red circle")

    async def end() -> ServiceEvent:
        return [event async for event in service.perform(request, Output(format="png"))][-1]

    waiting = [asyncio.create_task(end()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 jobs are waiting already; try again in about 30 s"):
        await end()
    comes.set()
    async with asyncio.timeout(PATIENCE_S):
        ends = await asyncio.gather(*waiting)
        assert [type(one) for one in (*ends, await end())] == [Media] * 3
    assert [args[5] for args in stages.all_sent["denoise"]] == [True] * 3


@pytest.mark.parametrize(("max_wait_s", "may"), [(None, True), (30.0, True), (29.0, False)])
def test_requests_wait_for_a_gang_as_long_as_they_may(max_wait_s: float | None, may: bool) -> None:
    assert rebuilt(Stages([DONE]), max_wait_s=max_wait_s).may_wait_for("m") == may
