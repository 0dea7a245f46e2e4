"""What a metered studio counts of requests that end in every way."""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from deployments.studio.interface import Media, Output
from deployments.usage.metered import MeteredStudio
from deployments.usage.own import OwnAccounts
from engines.gang.errors import TooLateError
from pipelines.request import MediaRequest
from pipelines.size import Size
from tests.deployments.support.fake_studio import ETA_S, GPU_S, PICTURES, FakeStudio

MODEL = "metered"
REQUEST = replace(
    PICTURES.request(Size(width=64, height=64), prompt="a", seed=0), model=MODEL, key="k", service_tier="flex"
)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"troupe_{name}", {"model": MODEL, **labels}) or 0.0


def deadlines() -> dict[str, float]:
    return {name: value("deadlines_total", outcome=name) for name in ("met", "missed", "refused", "failed")}


def failing(failure: Exception) -> FakeStudio:
    def fail(request: MediaRequest) -> None:
        raise failure

    return FakeStudio(before=fail)


async def perform(studio: FakeStudio, request: MediaRequest, *, leaves: bool = False) -> tuple[OwnAccounts, float]:
    """Returns the accounts after the request, whatever it came to, and how long its answer says that it took."""
    accounts, total_s = OwnAccounts(), 0.0
    with suppress(TooLateError, RuntimeError):
        async with aclosing(MeteredStudio(studio, accounts).perform(request, Output(format="png"))) as events:
            async for event in events:
                assert value("requests_open", tier="flex") == 1
                if isinstance(event, Media):
                    total_s = event.timings.total_s
                if leaves or isinstance(event, Media):
                    break
    assert value("requests_open", tier="flex") == 0
    return accounts, total_s


async def test_a_finished_request_is_counted() -> None:
    accounts, total_s = await perform(FakeStudio(), REQUEST)
    assert accounts.quotas.used("k")[:2] == (1, GPU_S)
    assert value("queue_seconds_count", tier="flex") == value("prediction_ratio_count") == 1
    assert value("predicted_seconds_sum") == ETA_S
    assert value("prediction_ratio_sum") == pytest.approx(total_s / ETA_S)
    assert value("gpu_seconds_total", key="k") == GPU_S
    assert set(deadlines().values()) == {0.0}


@pytest.mark.parametrize(
    ("studio", "deadline_s", "leaves", "outcome"),
    [
        (FakeStudio(), 600.0, False, "met"),
        (FakeStudio(), 1e-6, False, "missed"),
        (failing(TooLateError(0, 1.0, 2.0, "deadline_s", 1.0)), 600.0, False, "refused"),
        (failing(RuntimeError("a defect")), 600.0, False, "failed"),
        (FakeStudio(), 600.0, True, None),
        (failing(RuntimeError("a defect")), None, False, None),
    ],
)
async def test_what_becomes_of_a_deadline(
    studio: FakeStudio, deadline_s: float | None, leaves: bool, outcome: str | None
) -> None:
    before = deadlines()
    await perform(studio, replace(REQUEST, deadline_s=deadline_s), leaves=leaves)
    assert deadlines() == before | ({} if outcome is None else {outcome: before[outcome] + 1})
