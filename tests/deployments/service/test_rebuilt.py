"""A model that is not ready has a predicted return, and requests may or may not wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.service.interface import STATUS_MAX_AGE_S
from deployments.service.readiness import POLL_S, RETRY_AFTER_S, Readiness
from deployments.stages.measured_times import start_times_of
from tests.deployments.service.support.controller import MODELS, Clock, Controller, settled
from tests.support.patience import PATIENCE_S


async def test_how_long_a_model_was_missing_says_when_it_may_be_back(controller: Controller, clock: Clock) -> None:
    controller.is_running = False
    models = Readiness(MODELS)
    assert list(await models.not_ready()) == ["m"]
    assert models.retry_after_s("m") == RETRY_AFTER_S, "the duration is unknown"
    clock.now_s += 40.0
    controller.is_running = True
    assert await settled(models) == {}
    controller.is_running = False
    models.gang_lost()
    assert list(await settled(models)) == ["m"]
    assert models.retry_after_s("m") == 40.0, "the duration of the start"
    clock.now_s += 30.0
    assert models.retry_after_s("m") == 10.0
    clock.now_s += 30.0
    assert models.retry_after_s("m") == 20.0, "once more the delay: retries must not always be early"


async def test_of_a_first_start_nobody_is_told_to_come_all_the_time(controller: Controller, clock: Clock) -> None:
    controller.is_running = False
    models = Readiness(MODELS)
    told_s = []
    for _ in range(30):
        assert list(await models.not_ready()) == ["m"]
        told_s.append(models.retry_after_s("m"))
        clock.now_s += 2.0
    assert told_s == [max(RETRY_AFTER_S, 2.0 * number) for number in range(30)]


async def test_a_start_is_expected_to_take_as_long_as_the_one_before(
    controller: Controller, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    config = AppConfig.model_validate({"models": [{"name": "m"}]})
    controller.is_running = False
    first = Readiness(MODELS, start_times=start_times_of(config))
    assert list(await first.not_ready()) == ["m"]
    clock.now_s += 40.0
    controller.is_running = True
    assert await settled(first) == {}
    async with asyncio.timeout(PATIENCE_S):
        while not list(tmp_path.rglob("*.json")):
            await asyncio.sleep(0.01)
    controller.is_running = False
    again = Readiness(MODELS, start_times=start_times_of(config))
    clock.now_s += 10.0
    assert list(await again.not_ready()) == ["m"]
    assert again.retry_after_s("m") == 30.0
    other = AppConfig.model_validate({"models": [{"name": "m", "path": "elsewhere"}]})
    assert Readiness(MODELS, start_times=start_times_of(other)).retry_after_s("m") == RETRY_AFTER_S


async def test_a_replica_that_was_there_before_tells_nothing_of_starts(controller: Controller, clock: Clock) -> None:
    """A new ingress finds it like this, beside a running gang."""
    models = Readiness(MODELS)
    assert await settled(models) == {}
    controller.is_running = False
    models.gang_lost()
    assert list(await settled(models)) == ["m"]
    clock.now_s += 30.0
    assert models.retry_after_s("m") == 30.0


@pytest.mark.parametrize(
    ("status", "trigger", "is_rebuilt"),
    [
        ("HEALTHY", "UNSPECIFIED", True),
        ("UNHEALTHY", "HEALTH_CHECK_FAILED", True),
        ("UPDATING", "CONFIG_UPDATE_STARTED", True),  # a new controller says so
        ("UNHEALTHY", "REPLICA_STARTUP_FAILED", False),
        ("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", False),
    ],
)
async def test_what_was_ready_is_rebuilt_unless_its_start_fails(
    controller: Controller, clock: Clock, status: str, trigger: str, is_rebuilt: bool
) -> None:
    controller.is_running, controller.deployment_status, controller.trigger = False, status, trigger
    models = Readiness(MODELS)
    assert list(await settled(models)) == ["m"]
    had_replica = trigger == "HEALTH_CHECK_FAILED"  # this ingress may be new, and the model is not
    assert (models.is_rebuilt("m"), models.is_bare("m")) == (had_replica, True), "it starts for the first time"
    controller.is_running = True
    clock.now_s += POLL_S
    assert await settled(models) == {}
    assert (models.is_rebuilt("m"), models.is_bare("m")) == (False, False)
    controller.is_running = False
    models.gang_lost()
    assert list(await settled(models)) == ["m"]
    assert (models.is_rebuilt("m"), models.is_bare("m")) == (is_rebuilt, True)


async def test_a_new_ingress_knows_which_models_a_new_version_replaces(controller: Controller, clock: Clock) -> None:
    controller.is_running, controller.trigger = False, "CONFIG_UPDATE_STARTED"
    for deployed in ([], ["m"]):
        models = Readiness(MODELS, deployed=deployed)
        assert list(await settled(models)) == ["m"]
        assert models.is_rebuilt("m") == bool(deployed)


async def test_while_serve_builds_a_new_version_nothing_has_changed(controller: Controller, clock: Clock) -> None:
    models = Readiness(MODELS)
    assert await settled(models) == {}
    controller.fault = "builds"
    clock.now_s += STATUS_MAX_AGE_S
    await settled(models)
    assert await settled(models) == {}
    assert controller.num_asked > 1
