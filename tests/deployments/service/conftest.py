"""Run requests through simulated stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.service import flow, readiness, retries, run
from deployments.service.flow import DeployedService
from deployments.service.interface import Output, ServiceEvent
from deployments.service.readiness import Readiness
from tests.deployments.service.support.controller import Clock, Controller
from tests.deployments.service.support.set_stages import Stages
from tests.deployments.support.fake_service import PICTURES
from tests.support.patience import PATIENCE_S


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "RETRY_PAUSE_S", 0.0)


@pytest.fixture
def events_of(no_pause: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs a request through ``Stages`` by their clock, and returns all events."""

    async def run_all(stages: Stages, **fields: Any) -> list[ServiceEvent]:
        stages.set_clock_of(retries, run, patch=monkeypatch)
        request = replace(PICTURES.request(model="m", prompt="a red circle"), **fields)
        async with asyncio.timeout(PATIENCE_S):
            service = DeployedService({}, {"m": stages}, Readiness({"m": ()}))  # type: ignore[dict-item]
            return [event async for event in service.perform(request, Output(format="png"))]

    return run_all


@pytest.fixture
def perform(events_of: Callable[..., Any]) -> Callable[[Stages], Any]:
    """Return a function that runs a request and returns its last event."""

    async def run_to_end(stages: Stages) -> Any:
        return (await events_of(stages))[-1]

    return run_to_end


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    controller = Controller()
    monkeypatch.setattr(readiness, "application_status", controller.status)
    return controller


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(readiness, "time", clock)
    return clock
