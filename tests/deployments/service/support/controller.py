"""A simulated controller of Serve, and a clock that a test sets."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError

from deployments.names import STAGES, deployment_name
from deployments.service.readiness import Readiness
from tests.support.patience import PATIENCE_S

MODELS = {"m": tuple(deployment_name(stage, "m") for stage in STAGES)}


class Controller:
    """Answers for one model; counts the calls."""

    def __init__(self) -> None:
        self.num_asked, self.is_running = 0, True
        self.deployment_status, self.trigger = "UPDATING", "UNSPECIFIED"
        self.fault: str | None = None
        self.may_answer = threading.Event()

    def status(self) -> Any:
        self.num_asked += 1
        if self.fault == "raises":
            raise ActorDiedError
        if self.fault == "hangs":
            self.may_answer.wait(PATIENCE_S)
        if self.fault == "is nowhere":
            return None
        if self.fault == "builds":
            return SimpleNamespace(deployments={})
        state = {"RUNNING": 1} if self.is_running else {"STARTING": 1}
        overview = SimpleNamespace(replica_states=state, status=self.deployment_status, status_trigger=self.trigger)
        deployments = dict.fromkeys(MODELS["m"], overview)
        return SimpleNamespace(deployments=deployments)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


async def settled(models: Readiness) -> dict[str, str]:
    """Return the answer once no call is open."""
    await models.not_ready()
    while models._asking is not None:
        await asyncio.sleep(0.001)
    return dict(await models.not_ready())
