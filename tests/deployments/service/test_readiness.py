"""The controller is polled at a limited rate, and answers are cached meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import DeploymentStatusOverview

from deployments.service import readiness
from deployments.service.interface import STATUS_MAX_AGE_S
from deployments.service.readiness import POLL_S, Readiness, takes_requests
from engines.gang.eta.measured_times import MeasuredTimes
from tests.deployments.service.support.controller import MODELS, Clock, Controller, settled
from tests.support.patience import PATIENCE_S


async def test_requests_do_not_ask_while_all_is_well(controller: Controller, clock: Clock) -> None:
    models = Readiness(MODELS)
    assert await settled(models) == {}
    clock.now_s += STATUS_MAX_AGE_S - 0.1
    for _ in range(100):
        assert await models.not_ready() == {}
    assert controller.num_asked == 1
    assert await models.not_ready(1.0) == {}
    assert await settled(models) == {}
    assert controller.num_asked == 2


async def test_a_lost_gang_is_looked_for_at_once(controller: Controller, clock: Clock) -> None:
    models = Readiness(MODELS)
    assert await settled(models) == {}
    controller.is_running = False
    assert await settled(models) == {}, "the loss is unnoticed"
    models.gang_lost()
    assert list(await settled(models)) == ["m"]
    controller.is_running = True
    assert list(await settled(models)) == ["m"], "asked a moment ago"
    clock.now_s += POLL_S
    assert await models.not_ready() == {}, "while something is missing, the answer is a fresh one"


async def test_the_controller_may_hear_of_a_lost_gang_later(controller: Controller, clock: Clock) -> None:
    models = Readiness(MODELS)
    assert await settled(models) == {}
    models.gang_lost()
    assert await settled(models) == {}
    controller.is_running = False
    clock.now_s += POLL_S
    assert list(await settled(models)) == ["m"]


async def test_a_gang_may_be_lost_while_the_controller_is_asked(controller: Controller, clock: Clock) -> None:
    models = Readiness(MODELS)
    assert await settled(models) == {}
    clock.now_s += STATUS_MAX_AGE_S
    controller.fault = "hangs"
    assert await models.not_ready() == {}
    models.gang_lost()
    controller.may_answer.set()
    assert await settled(models) == {}
    controller.is_running = False
    clock.now_s += POLL_S
    assert list(await settled(models)) == ["m"]


@pytest.mark.parametrize("fault", ["raises", "hangs", "is nowhere"])
async def test_without_a_controller_nothing_has_changed(
    controller: Controller, clock: Clock, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begins() -> None:
        controller.fault = fault
        controller.may_answer.clear()
        monkeypatch.setattr(readiness, "ANSWER_DEADLINE_S", 0.02 if fault == "hangs" else PATIENCE_S)
        clock.now_s += STATUS_MAX_AGE_S

    def ends() -> None:
        controller.fault = None
        controller.may_answer.set()
        monkeypatch.setattr(readiness, "ANSWER_DEADLINE_S", PATIENCE_S)
        clock.now_s += STATUS_MAX_AGE_S

    models = Readiness(MODELS)
    assert await settled(models) == {}
    begins()
    assert await settled(models) == {}
    ends()
    controller.is_running = False
    await settled(models)
    assert list(await settled(models)) == ["m"], "it is asked again"
    begins()
    assert list(await models.not_ready()) == ["m"]
    ends()


async def test_a_controller_that_does_not_answer_keeps_one_thread_busy(
    controller: Controller, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests need these few threads for other work."""
    monkeypatch.setattr(readiness, "ANSWER_DEADLINE_S", 0.02)
    controller.fault = "hangs"
    models = Readiness(MODELS)
    for _ in range(3):
        assert list(await models.not_ready()) == ["m"]
        clock.now_s += POLL_S
    assert controller.num_asked == 1
    controller.may_answer.set()
    monkeypatch.setattr(readiness, "ANSWER_DEADLINE_S", PATIENCE_S)
    assert await settled(models) == {}


async def test_a_disk_that_does_not_answer_delays_no_look(
    controller: Controller, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a start is written to the data directory, which may be on a network."""
    times, may_write = MeasuredTimes(None, "starts"), threading.Event()
    monkeypatch.setattr(times, "save", lambda: may_write.wait(PATIENCE_S))
    models = Readiness(MODELS, start_times=times)
    controller.is_running = False
    assert list(await models.not_ready()) == ["m"]
    clock.now_s += POLL_S + 1.0
    controller.is_running = True
    async with asyncio.timeout(PATIENCE_S / 2):
        assert await settled(models) == {}
        controller.is_running = False
        models.gang_lost()
        assert list(await settled(models)) == ["m"]
    may_write.set()


def overview_of(status: str, trigger: str, states: dict[str, int]) -> DeploymentStatusOverview:
    return DeploymentStatusOverview(
        status=DeploymentStatus(status),
        status_trigger=DeploymentStatusTrigger(trigger),
        replica_states={ReplicaState(state): num for state, num in states.items()},
        message="",
    )


@pytest.mark.parametrize(
    ("status", "states", "takes"),
    [
        ("HEALTHY", {"RUNNING": 1}, True),
        ("UNHEALTHY", {"RUNNING": 1, "STARTING": 1}, True),
        ("HEALTHY", {}, True),  # scaled to zero: a request starts a replica
        ("UPSCALING", {"STARTING": 1}, True),
        ("UPDATING", {"RECOVERING": 1}, True),  # it serves, and a new controller does not know yet
        ("UPDATING", {"STARTING": 1}, False),
        ("UPDATING", {}, False),
        ("HEALTHY", {"STARTING": 1}, False),  # a lost gang is being replaced
        ("UNHEALTHY", {}, False),
        ("DEPLOY_FAILED", {}, False),
    ],
)
def test_which_deployments_take_requests(status: str, states: dict[str, int], takes: bool) -> None:
    overview = overview_of(status, "UNSPECIFIED", states)
    assert takes_requests(overview) == takes


@pytest.mark.parametrize(
    ("status", "trigger", "takes"),
    [
        ("HEALTHY", "UNSPECIFIED", True),  # the lost one is being replaced
        ("UNHEALTHY", "HEALTH_CHECK_FAILED", True),
        ("UNHEALTHY", "REPLICA_STARTUP_FAILED", False),
        ("DOWNSCALING", "AUTOSCALING", True),  # a request that comes now starts one again
        ("UPDATING", "CONFIG_UPDATE_STARTED", False),
        ("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", False),
    ],
)
def test_where_there_may_be_no_replica_requests_wait_for_one_that_is_replaced(
    status: str, trigger: str, takes: bool
) -> None:
    overview = overview_of(status, trigger, {"STARTING": 1, "STOPPING": 1})
    assert takes_requests(overview, on_demand=True) == takes
    assert not takes_requests(overview), "requests are refused if a replica should exist"


async def test_which_deployments_may_have_no_replica_is_known_by_name(controller: Controller) -> None:
    controller.is_running, controller.deployment_status = False, "HEALTHY"
    assert list(await settled(Readiness(MODELS))) == ["m"]
    assert list(await settled(Readiness(MODELS, on_demand=MODELS["m"][:1]))) == ["m"]
    assert await settled(Readiness(MODELS, on_demand=MODELS["m"])) == {}
