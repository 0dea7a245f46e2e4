"""A request is charged to its key and counted in metrics, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client import REGISTRY
from ray.exceptions import ActorDiedError

from deployments.service import flow
from deployments.service.flow import DeployedService
from deployments.service.interface import Media, Output, ServiceEvent
from deployments.service.readiness import Readiness
from deployments.usage.accounts import Accounts
from engines.gang.errors import GangBrokenError, TooLateError
from engines.gang.jobs.job import JobDone, JobQueued, Progress
from tests.deployments.service.support.set_stages import Act, Stages
from tests.deployments.support.fake_service import PICTURES
from tests.support.patience import PATIENCE_S

KEY = "k"
ETA_S, DECODE_S = 20.0, 7.0
QUEUED = JobQueued(job_id="j", eta_s=ETA_S)
STEPS = [Progress(job_id="j", step=step, num_steps=3, num_ranks=2, gpu_s=1.5 * (step - 1)) for step in (1, 2, 3)]
DONE = JobDone(job_id="j", latents="latents", queue_s=0.5, denoise_s=1.0, was_warm=True, gpu_s=4.5)  # type: ignore[arg-type]
BROKEN = GangBrokenError("rank 1 died", "death", in_flight=True)


class Metered:
    """A service of one model of its own, whose stages act as in ``acts``; and its accounts."""

    def __init__(self, *acts: list[Act]) -> None:
        self.model, self.accounts = f"metered-{uuid4().hex}", Accounts()
        self.stages = Stages(*acts)
        self.stages.expected_s = DECODE_S
        stages: Any = {self.model: self.stages}
        self.service = DeployedService({}, stages, Readiness({self.model: ()}), accounts=self.accounts)

    def value(self, name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"troupe_{name}", {"model": self.model, **labels}) or 0.0

    def deadlines(self) -> dict[str, float]:
        outcomes = {
            name: self.value("deadlines_total", outcome=name) for name in ("met", "missed", "refused", "failed")
        }
        return {name: number for name, number in outcomes.items() if number}

    async def perform(self, *, leaves_at: int | None = None, **fields: Any) -> list[ServiceEvent]:
        """Return the events of a request, whose client leaves after step ``leaves_at``, once all of it is charged."""
        request = PICTURES.request(model=self.model, prompt="a red circle")
        request = replace(request, key=KEY, service_tier="flex", **fields)
        got: list[ServiceEvent] = []
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                aclosing(self.service.perform(request, Output(format="png"))) as events,
            ):
                async for event in events:
                    assert self.value("requests_open", tier="flex") == 1
                    got.append(event)
                    if isinstance(event, Progress) and event.step == leaves_at:
                        break
        finally:
            assert self.value("requests_open", tier="flex") == 0
            while self.service.meter._charging:
                await asyncio.sleep(0)
        return got

    async def charged(self) -> tuple[int, float]:
        """Return finished requests and GPU-seconds of the key, equal to its limit's balance and the metrics."""
        balance = await self.accounts.used(KEY)
        assert balance.gpu_s == balance.last_minute_s == self.value("gpu_seconds_total", key=KEY)
        return balance.num_requests, balance.gpu_s


@pytest.fixture(autouse=True)
def no_pause() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "RETRY_PAUSE_S", 0.0)
        yield


async def test_a_finished_request_is_charged_and_counted_once() -> None:
    metered = Metered([QUEUED, *STEPS, DONE])
    media = (await metered.perform())[-1]
    assert isinstance(media, Media)
    assert await metered.charged() == (1, 4.5)
    assert not metered.stages.asked
    assert metered.value("queue_seconds_count", tier="flex") == metered.value("prediction_ratio_count") == 1
    predicted_s = metered.value("predicted_seconds_sum")
    assert predicted_s == media.timings.eta_s
    assert predicted_s == pytest.approx(ETA_S + DECODE_S, abs=1.0)
    assert metered.value("prediction_ratio_sum") == pytest.approx(media.timings.total_s / predicted_s)
    assert metered.deadlines() == {}


@pytest.mark.parametrize(
    ("end", "deadline_s", "leaves_at", "expected"),
    [
        (DONE, 600.0, None, {"met": 1}),
        (DONE, 1e-6, None, {"missed": 1}),
        (TooLateError(0, 1.0, 2.0, "deadline_s", 1.0), 600.0, None, {"refused": 1}),
        (RuntimeError("a defect"), 600.0, None, {"failed": 1}),
        (DONE, 600.0, 2, {}),
        (RuntimeError("a defect"), None, None, {}),
    ],
)
async def test_what_becomes_of_a_deadline(
    end: Act, deadline_s: float | None, leaves_at: int | None, expected: dict[str, float]
) -> None:
    metered = Metered([*STEPS, end])
    with suppress(TooLateError, RuntimeError):
        await metered.perform(deadline_s=deadline_s, leaves_at=leaves_at)
    assert metered.deadlines() == expected


@pytest.mark.parametrize(
    ("told", "expected_s"),
    [
        ([0.0, 4.5, 0.0], 4.5),
        ([ActorDiedError(), 0.0], 3.0),
        (TimeoutError(), 3.0),
    ],
)
async def test_a_client_that_leaves_pays_what_ranks_have_done_by_then(told: Any, expected_s: float) -> None:
    """One gang of several has the job, and knows of running steps. Without an answer the reported time counts."""
    metered = Metered([*STEPS, asyncio.Event()])
    metered.stages.spent_s = told
    await metered.perform(leaves_at=3)
    assert await metered.charged() == (0, expected_s)
    assert len(metered.stages.asked) == 1


async def test_a_client_that_leaves_while_it_is_decoded_pays_all_of_it() -> None:
    metered = Metered([*STEPS, DONE])
    metered.stages._decode = asyncio.Event().wait  # type: ignore[assignment]
    task = asyncio.create_task(metered.perform())
    async with asyncio.timeout(PATIENCE_S):
        while "decode" not in metered.stages.sent:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert await metered.charged() == (0, 4.5)
    assert not metered.stages.asked, "no gang is queried"


@pytest.mark.parametrize(
    ("end", "expected_s"), [(ValueError("too large"), 4.0), (RuntimeError("a defect"), 0.0), (BROKEN, 0.0)]
)
async def test_what_fails_costs_if_it_is_its_clients_doing(end: Exception, expected_s: float) -> None:
    metered = Metered([*STEPS, end])
    metered.stages.spent_s = [4.0]
    with pytest.raises(type(end)):
        await metered.perform()
    assert await metered.charged() == (0, expected_s)


async def test_a_broken_gang_costs_nothing_and_the_next_what_it_did() -> None:
    metered = Metered([*STEPS, BROKEN], [*STEPS, DONE])
    metered.stages.spent_s = [1.0]
    await metered.perform()
    assert await metered.charged() == (1, 4.5)
    assert not metered.stages.asked


async def test_what_the_server_ends_costs_nothing() -> None:
    metered = Metered([*STEPS, asyncio.Event()])
    metered.stages.spent_s = [4.5]
    metered.service.meter.stop()
    await metered.perform(leaves_at=2)
    assert await metered.charged() == (0, 0.0)
