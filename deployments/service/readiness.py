"""Readiness of models for requests: the states of their deployments, from Serve's controller, in few queries."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence

from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from deployments.asyncio_tools import OneThread
from deployments.ray_private import application_status
from deployments.service.interface import STATUS_MAX_AGE_S
from deployments.stages.measured_times import start_key
from engines.gang.eta.measured_times import MeasuredTimes

POLL_S = 1.0
"""Shortest interval between queries of the controller, while a replica is missing or after a gang was lost."""
ANSWER_DEADLINE_S = 5.0
"""Time for the controller's answer: there is none while it is being replaced."""
RETRY_AFTER_S = 2.0
"""Assumed for an outage of unknown length, or longer than the last one."""

logger = logging.getLogger("troupe.readiness")


class Readiness:
    """Readiness of models for requests. ``models`` has each model's deployments by name.

    Deployments ``on_demand`` may have no replica until a request needs one. The models ``deployed`` before this process
    may be replaced by a new version. ``start_times``: durations of earlier starts, by model.

    A query costs CPU time here and in the controller, and every request needs the answer. So requests use the last
    answer while all is well. It is renewed in the background when it is old or a gang was lost. Requests wait for
    a new answer only while a replica is missing. If the controller does not answer, the last state counts: replicas
    serve without it.
    """

    def __init__(
        self,
        models: Mapping[str, Collection[str]],
        on_demand: Collection[str] = (),
        deployed: Collection[str] = (),
        start_times: MeasuredTimes | None = None,
    ) -> None:
        self._start_times = start_times or MeasuredTimes(None, "starts")
        self._models, self._on_demand = dict(models), frozenset(on_demand)
        self._reasons: Mapping[str, str] = dict.fromkeys(models, "the application is starting")
        self._missing_since_s = dict.fromkeys(models, time.monotonic())
        starts_s = {model: self._start_times.get(start_key(model)) for model in models}
        self._took_s = {model: start_s for model, start_s in starts_s.items() if start_s is not None}
        """Length of each model's last outage; at first, of its last start."""
        self._were_ready = set(deployed)
        self._rebuilt: frozenset[str] = frozenset()
        self._bare: frozenset[str] = frozenset()
        """Models of which a deployment has no replica that runs, whether it takes requests or not."""
        self._asked_s = self._lost_s = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._controller = OneThread(application_status)

    async def not_ready(self, max_age_s: float = STATUS_MAX_AGE_S) -> Mapping[str, str]:
        """Return the models with a deployment that takes no requests, each with the first such deployment."""
        now_s = time.monotonic()
        if self._reasons or self._bare or now_s - self._lost_s < STATUS_MAX_AGE_S:
            max_age_s = min(max_age_s, POLL_S)
        if now_s - self._asked_s >= max_age_s and self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        if self._reasons and self._asking is not None:
            await asyncio.shield(self._asking)
        return self._reasons

    def retry_after_s(self, model: str) -> float:
        """Return the predicted seconds until ``model`` is back: as long as its last outage.

        If it is later than that, or had no outage yet, it is expected to take as long again as it has taken so far.
        """
        if model not in self._missing_since_s:
            return RETRY_AFTER_S
        left_s = self._missing_since_s[model] + self._took_s.get(model, 0.0) - time.monotonic()
        return left_s if left_s > 0 else max(RETRY_AFTER_S, -left_s)

    def is_rebuilt(self, model: str) -> bool:
        """Return whether ``model`` was ready before and lost a replica that is being replaced."""
        return model in self._rebuilt

    def is_bare(self, model: str) -> bool:
        """Return whether a request for ``model`` must wait for a replica, by the controller's last answer."""
        return model in self._bare

    def gang_lost(self) -> None:
        """Invalidate the known state of the deployments.

        The controller may learn of the loss later, and its pending answer is older than it.
        """
        self._asked_s, self._lost_s = -math.inf, time.monotonic()

    async def _ask(self) -> None:
        try:
            status = await self._controller.answer(ANSWER_DEADLINE_S)
            if status is not None and status.deployments:  # else there is no controller, or a new version is built
                has_started = self._note(find_reasons(status, self._models, self._on_demand))
                self._look_for_replicas(status)
                if has_started:  # in the background: a network disk may never answer
                    self._saving = asyncio.create_task(asyncio.to_thread(self._start_times.save))
        except Exception as error:  # of Ray, Serve or its schema: whatever an actor that is gone looks like
            logger.warning("Serve's controller gives no answer: %r", error)
        finally:
            self._asked_s = time.monotonic()
            self._asking = None

    def _note(self, reasons: Mapping[str, str]) -> bool:
        """Record which models are missing. Return whether the time of a start has changed."""
        now_s, has_started = time.monotonic(), False
        for model in self._models:
            if model in reasons:
                self._missing_since_s.setdefault(model, now_s)
                continue
            since_s = self._missing_since_s.pop(model, now_s)
            if now_s > since_s + POLL_S:  # else it was there when this process began to ask
                self._took_s[model] = now_s - since_s
                if model not in self._were_ready | self._rebuilt:
                    has_started |= self._start_times.learn(start_key(model), now_s - since_s)
            self._were_ready.add(model)
        self._reasons = reasons
        return has_started

    def _look_for_replicas(self, status: ApplicationStatusOverview) -> None:
        known = {model: [status.deployments.get(name) for name in names] for model, names in self._models.items()}
        self._bare = frozenset(
            model for model, found in known.items() if not all(one is not None and num_running(one) for one in found)
        )
        self._rebuilt = frozenset(model for model in self._reasons if self._is_replaced(model, known[model]))

    def _is_replaced(self, model: str, found: Sequence[DeploymentStatusOverview | None]) -> bool:
        """Return whether each deployment of a model that was ready has a replica, or gets another.

        A new ingress knows by Serve's words alone that it was ready. A new controller says "UPDATING" until the
        deployment is whole again.
        """
        was_ready = model in self._were_ready
        if not was_ready and not any(one is not None and lost_replica(one) for one in found):
            return False
        return all(
            one is not None and (takes_requests(one, on_demand=True) or (was_ready and one.status == "UPDATING"))
            for one in found
        )


def find_reasons(
    status: ApplicationStatusOverview, models: Mapping[str, Collection[str]], on_demand: Collection[str]
) -> dict[str, str]:
    """Return the models that cannot serve, each with its first deployment that takes no requests.

    ``models`` maps each to the names of its deployments; those ``on_demand`` may have no replica until asked for one.
    """
    deployments = status.deployments
    reasons: dict[str, str] = {}
    for model, names in models.items():
        for name in names:
            if name not in deployments or not takes_requests(deployments[name], on_demand=name in on_demand):
                reasons.setdefault(model, f"{name} has no running replica")
    return reasons


def takes_requests(deployment: DeploymentStatusOverview, *, on_demand: bool = False) -> bool:
    """Return whether a replica runs or the next request starts one (scaled to zero, or scaling up).

    With ``on_demand``, a deployment also takes requests while its last replica stops or is replaced: they wait as for
    the first one. It takes none before it was deployed, nor if its replicas fail to start.
    """
    if num_running(deployment) or deployment.status == "UPSCALING":
        return True
    if on_demand and deployment.status == "UNHEALTHY":
        return lost_replica(deployment)
    return deployment.status in ("HEALTHY", "DOWNSCALING") and (
        on_demand or not sum(deployment.replica_states.values())
    )


def lost_replica(deployment: DeploymentStatusOverview) -> bool:
    """Return whether a replica that was there is being replaced, and not one that failed to start."""
    return deployment.status == "UNHEALTHY" and deployment.status_trigger == "HEALTH_CHECK_FAILED"


def num_running(deployment: DeploymentStatusOverview) -> int:
    """Return the running replicas, including those that a new controller does not know yet."""
    # Keys are an enum in Ray's annotations, and strings after the way through the controller.
    serving = ("RUNNING", "RECOVERING")
    return sum(count for state, count in deployment.replica_states.items() if str(state).endswith(serving))
