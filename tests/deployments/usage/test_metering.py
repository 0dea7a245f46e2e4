"""What a request costs its key that ends before there is anything to show for it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from ray.exceptions import ActorDiedError

from deployments.studio import flow, run
from deployments.studio.flow import DeployedStudio
from deployments.studio.interface import Media, Output, Progress
from deployments.studio.readiness import Readiness
from deployments.usage.own import OwnAccounts
from engines.gang.errors import GangBrokenError
from engines.gang.jobs.job import JobDone, StepDone
from tests.deployments.studio.support.set_stages import Act, Stages
from tests.deployments.support.fake_studio import PICTURES
from tests.support.patience import PATIENCE_S

KEY = "k"
STEPS = [
    StepDone(job_id="j", step=step, num_steps=3, step_ms=1.0, num_ranks=2, gpu_s=1.5 * (step - 1)) for step in (1, 2, 3)
]
DONE = JobDone(job_id="j", latents="latents", queue_s=0.0, denoise_s=1.0, was_warm=True, gpu_s=4.5)  # type: ignore[arg-type]
BROKEN = GangBrokenError("rank 1 died", "death", in_flight=True)


@pytest.fixture(autouse=True)
def no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(run, "observe_stage", lambda *_: None)


def counted(model: str) -> float:
    return REGISTRY.get_sample_value("troupe_gpu_seconds_total", {"model": model, "key": KEY}) or 0.0


async def charged(stages: Stages, *, leaves_at: int | None = None, ends: bool = False) -> tuple[int, float]:
    """Finished requests and GPU-seconds of the key, after one that its client leaves ``leaves_at`` a step; ``ends``:
    the server does."""
    accounts, before = OwnAccounts(), counted("m")
    studio = DeployedStudio({}, {"m": stages}, Readiness({"m": ()}), accounts=accounts)  # type: ignore[dict-item]
    request = replace(PICTURES.request(model="m", prompt="a red circle"), key=KEY)
    if ends:
        studio.spending.stop()
    async with asyncio.timeout(PATIENCE_S), aclosing(studio.perform(request, Output(format="png"))) as events:
        async for event in events:
            if isinstance(event, Media) or (isinstance(event, Progress) and event.step == leaves_at):
                break
    while studio.spending._asking:
        await asyncio.sleep(0)
    num_requests, gpu_s, last_minute_s = accounts.quotas.used(KEY)
    assert gpu_s == last_minute_s, "the limit is on it"
    assert gpu_s == pytest.approx(counted("m") - before)
    return num_requests, gpu_s


@pytest.mark.parametrize(
    ("told", "expected_s"),
    [
        ([0.0, 4.5, 0.0], 4.5),
        ([ActorDiedError(), 0.0], 3.0),
        (TimeoutError(), 3.0),
    ],
)
async def test_who_leaves_pays_what_ranks_have_done_by_then(told: Any, expected_s: float) -> None:
    """One gang of several has the job, and knows of steps that were under way. If none says, what was told counts."""
    stages = Stages([*STEPS, asyncio.Event()])
    stages.spent_s = told
    assert await charged(stages, leaves_at=3) == (0, expected_s)
    assert len(stages.asked) == 1


async def test_who_leaves_while_it_is_decoded_pays_all_of_it() -> None:
    stages, accounts = Stages([*STEPS, DONE]), OwnAccounts()
    never = asyncio.Event()
    stages._decode = never.wait  # type: ignore[assignment]
    studio = DeployedStudio({}, {"m": stages}, Readiness({"m": ()}), accounts=accounts)  # type: ignore[dict-item]
    request = replace(PICTURES.request(model="m", prompt="a red circle"), key=KEY)

    async def perform() -> None:
        async for _ in studio.perform(request, Output(format="png")):
            pass

    task = asyncio.create_task(perform())
    async with asyncio.timeout(PATIENCE_S):
        while "decode" not in stages.sent:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert accounts.quotas.used(KEY) == (0, 4.5, 4.5)
    assert not stages.asked, "nobody need be"


@pytest.mark.parametrize(
    ("acts", "expected_s"),
    [
        ([*STEPS, ValueError("too large")], 4.0),
        ([*STEPS, RuntimeError("a defect")], 0.0),
        ([*STEPS, BROKEN], 0.0),
    ],
)
async def test_what_fails_costs_if_it_is_its_clients_doing(acts: list[Act], expected_s: float) -> None:
    stages = Stages(acts)
    stages.spent_s = [4.0]
    accounts = OwnAccounts()
    studio = DeployedStudio({}, {"m": stages}, Readiness({"m": ()}), accounts=accounts)  # type: ignore[dict-item]
    request = replace(PICTURES.request(model="m", prompt="a red circle"), key=KEY)
    with pytest.raises(type(acts[-1])):  # type: ignore[arg-type]
        _ = [event async for event in studio.perform(request, Output(format="png"))]
    while studio.spending._asking:
        await asyncio.sleep(0)
    assert accounts.quotas.used(KEY)[:2] == (0, expected_s)


async def test_a_broken_gang_costs_nothing_and_the_next_what_it_did() -> None:
    stages = Stages([*STEPS, BROKEN], [*STEPS, DONE])
    stages.spent_s = [1.0]
    assert await charged(stages, leaves_at=None) == (0, 0.0), "a finished one is counted elsewhere"
    assert not stages.asked


async def test_what_the_server_ends_costs_nothing() -> None:
    stages = Stages([*STEPS, asyncio.Event()])
    stages.spent_s = [4.5]
    assert await charged(stages, leaves_at=2, ends=True) == (0, 0.0)
