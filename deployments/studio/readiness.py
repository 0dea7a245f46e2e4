"""Which models can take requests: what Serve's controller knows of the deployments, asked as seldom as possible."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping

from ray import serve
from ray.serve.schema import DeploymentStatusOverview, ServeStatus

from deployments.names import APPLICATION, STAGES, deployment_name
from deployments.studio.interface import STATUS_MAX_AGE_S

POLL_S = 1.0
"""While something is missing, the controller is asked this often at most."""


class Readiness:
    """Whether ``models`` can take requests, by name.

    To ask the controller takes some 30 ms of CPU time here and there, and every request wants to know. So while all is
    well the answer is the last known one, renewed behind the requests when it is old or a gang was lost; only while
    something is missing do requests wait for a fresh one.
    """

    def __init__(self, models: Collection[str]) -> None:
        self._models = tuple(models)
        self._reasons: Mapping[str, str] = dict.fromkeys(models, "the application is starting")
        self._asked_s = -math.inf
        self._asking: asyncio.Task[None] | None = None

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """Returns the models with a deployment that takes no requests, each with the first such deployment."""
        max_age_s = min(max_age_s, POLL_S) if self._reasons else max_age_s
        if time.monotonic() - self._asked_s >= max_age_s and self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        if self._reasons and self._asking is not None:
            await asyncio.shield(self._asking)
        return self._reasons

    def gang_lost(self) -> None:
        """Says that what was known of the deployments is no longer so."""
        self._asked_s = -math.inf

    async def _ask(self) -> None:
        try:
            self._reasons = find_reasons(await asyncio.to_thread(serve.status), self._models)
            self._asked_s = time.monotonic()
        finally:
            self._asking = None


def find_reasons(status: ServeStatus, models: tuple[str, ...]) -> dict[str, str]:
    """Returns the models that cannot serve, each with the deployment that takes no requests."""
    application = status.applications.get(APPLICATION)
    deployments = application.deployments if application else {}
    reasons: dict[str, str] = {}
    for model in models:
        for stage in STAGES:
            name = deployment_name(stage, model)
            if name not in deployments or not takes_requests(deployments[name]):
                reasons.setdefault(model, f"{name} has no running replica")
    return reasons


def takes_requests(deployment: DeploymentStatusOverview) -> bool:
    """Returns whether a replica runs, or the next request starts one: scaled down to none, or on the way up again."""
    if num_running(deployment) or deployment.status == "UPSCALING":
        return True
    return deployment.status == "HEALTHY" and not sum(deployment.replica_states.values())


def num_running(deployment: DeploymentStatusOverview) -> int:
    # Keys are an enum in Ray's annotations, and strings after the way through the controller.
    return sum(count for state, count in deployment.replica_states.items() if str(state).endswith("RUNNING"))
