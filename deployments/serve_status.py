"""What Serve's controller knows of the application, without the rest that ``serve.status()`` looks at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from deployments.names import APPLICATION


def application_status() -> ApplicationStatusOverview | None:
    """Returns what ``serve.status()`` says of the application; None if Serve does not run, or has no such application.

    That checks the whole configuration of each deployment as well, for which Ray 2.60 pickles classes: 6 ms of CPU time
    each, while somebody asks every second.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    details = None if client is None else client.get_serve_details()["applications"].get(APPLICATION)
    if details is None:
        return None
    return ApplicationStatusOverview(
        status=ApplicationStatus(details["status"]),
        message=details["message"],
        last_deployed_time_s=details["last_deployed_time_s"],
        deployments={name: _overview(one) for name, one in details["deployments"].items()},
    )


def _overview(deployment: Mapping[str, Any]) -> DeploymentStatusOverview:
    states = Counter(ReplicaState(one["state"]) for one in deployment["replicas"])
    return DeploymentStatusOverview(
        status=DeploymentStatus(deployment["status"]),
        status_trigger=DeploymentStatusTrigger(deployment["status_trigger"]),
        replica_states=dict(states),
        message=deployment["message"],
    )
