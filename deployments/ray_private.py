"""All uses of Ray's private names, written for Ray 2.60.

``tests/deployments/test_ray_private.py`` tests each against the installed Ray.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import parameter, ray_constants, services, worker
from ray._private.node import Node
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.utils import get_head_node_id
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from deployments.names import APPLICATION

OPTIONAL_SERVERS = ("start_log_monitor", "start_monitor", "start_api_server")
"""Methods of Ray's node that start the log monitor, the autoscaler and the dashboard."""


def init_local(temp_dir: Path, system_config: Mapping[str, Any], **options: Any) -> None:
    """Start a cluster with files in ``temp_dir``, regardless of RAY_ADDRESS. ``options`` are those of ``ray.init``.

    Its agent takes any free port. Ray's default, 52365, belongs to the first cluster of a machine, and Linux gives it
    to outgoing connections. The agent then tries in vain for three seconds, for which ``ray.init`` waits.
    """
    with _replaced(parameter, "RayParams", partial(parameter.RayParams, dashboard_agent_listen_port=0)):
        ray.init(address="local", _temp_dir=str(temp_dir), _system_config=dict(system_config), **options)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def worker_setup_script(script: Path) -> AbstractContextManager[None]:
    """Set up Python workers of a node that starts inside the block by ``script``.

    Ray joins its script's name to a folder, which an absolute path replaces (``Node.__init__``). Ray's own script
    imports all of Ray once more in each worker.
    """
    return _replaced(ray_constants, "SETUP_WORKER_FILENAME", str(script))


@contextmanager
def without_optional_servers() -> Iterator[None]:
    """Start nodes inside the block without ``OPTIONAL_SERVERS``, which saves seconds of CPU time.

    Ray has options for two of them, on its command line only (``--include-log-monitor``, ``--no-monitor``).
    """
    with ExitStack() as stack:
        for name in OPTIONAL_SERVERS:
            stack.enter_context(_replaced(Node, name, lambda node, **options: None))
        yield


def processes_in_own_sessions() -> AbstractContextManager[None]:
    """Start each of Ray's processes inside the block as the leader of its own session.

    Ctrl-C in a terminal, ``timeout`` and supervisors signal a whole process group. The server ends its cluster in
    order, and waits a minute for a process that is already gone. Ray has no option for that. Only on Linux: elsewhere
    Ray ends its processes by their group when the server is killed.
    """
    if not sys.platform.startswith("linux"):
        return nullcontext()

    class InOwnSession(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, start_new_session=True, **kwargs)

    return _replaced(services, "ConsolePopen", InOwnSession)


def quiet_logs(log: Callable[[str], None]) -> None:
    """Send Ray's output about dead processes to ``log``, and drop its log lines of every start.

    Ray prints it regardless of ``log_to_driver`` (``listen_error_messages``).
    """

    def print_to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        lines: Sequence[object] = data["lines"]
        log(" ".join(map(str, lines)))

    setattr(worker, "print_to_stdstream", print_to_log)  # noqa: B010
    worker.logger.setLevel(logging.WARNING)
    authentication = logging.getLogger("ray._private.authentication.authentication_token_setup")
    authentication.addFilter(lambda record: "is enabled" not in record.getMessage())


class _VersionedConfig(DeploymentConfig):
    """Options of a deployment that keep their version, whichever Serve assigns (``get_deploy_args``)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version":
            super().__setattr__(name, value)


def with_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Give ``deployment`` a version of its own, and return it.

    Serve restarts the replicas of a new version. It gives all deployments of an application one version, which changes
    with any argument. No public option sets it.
    """
    options = {name: getattr(deployment._deployment_config, name) for name in DeploymentConfig.model_fields}
    deployment._deployment_config = _VersionedConfig.model_construct(**options | {"version": version})
    return deployment


def controller_answers(within_s: float) -> bool:
    """Return whether Serve's controller answers a call in time; False without Serve."""
    controller = _controller()
    if controller is None:
        return False
    ready, _ = ray.wait([controller.check_alive.remote()], timeout=within_s)
    return bool(ready)


def restart_controller() -> None:
    """Kill the process of Serve's controller. Ray starts another, which resumes from the stored state."""
    controller = _controller()
    if controller is not None:
        ray.kill(controller, no_restart=False)


def application_status(name: str = APPLICATION) -> ApplicationStatusOverview | None:
    """Return the application's part of ``serve.status()``; None without Serve or the application.

    ``serve.status()`` itself also validates each deployment's configuration, with 6 ms of CPU time for pickling.
    """
    client = _client()
    details = None if client is None else client.get_serve_details()["applications"].get(name)
    if details is None:
        return None
    return ApplicationStatusOverview(
        status=ApplicationStatus(details["status"]),
        message=details["message"],
        last_deployed_time_s=details["last_deployed_time_s"],
        deployments={key: _deployment_status(one) for key, one in details["deployments"].items()},
    )


def deployment_names(name: str = APPLICATION) -> frozenset[str]:
    """Return the deployments of an application, which its status lacks while Serve builds a new version of it."""
    controller = _controller()
    ids = [] if controller is None else ray.get(controller.list_deployment_ids.remote())
    return frozenset(one.name for one in ids if one.app_name == name)


def _deployment_status(deployment: Mapping[str, Any]) -> DeploymentStatusOverview:
    states = Counter(ReplicaState(one["state"]) for one in deployment["replicas"])
    return DeploymentStatusOverview(
        status=DeploymentStatus(deployment["status"]),
        status_trigger=DeploymentStatusTrigger(deployment["status_trigger"]),
        replica_states=dict(states),
        message=deployment["message"],
    )


def log_folder() -> Path | None:
    """Return the folder of this node's Ray logs; None if this process is in no cluster, or the node is another host."""
    node = worker._global_node
    folder = None if node is None else Path(node.get_logs_dir_path())
    return folder if folder is not None and folder.is_dir() else None


def serve_host() -> str:
    """Return the host name or address at which Serve's proxies listen. It blocks: not for an event loop."""
    client = _client()
    assert client is not None, "Serve does not run"
    return str(client.http_config.host)


def bind_replicas_to_loopback() -> None:
    """Bind the call port of this process's replica to 127.0.0.1. Call it before the deployment is initialized.

    Ray opens the port on all interfaces and unpickles messages from anywhere (``Replica._on_initialized``), without a
    setting for that.
    """
    from ray.serve._private import replica  # needed in replicas only, and its imports take time

    name = "add_port_to_grpc_server"
    bind = getattr(replica, name)

    def bind_to_loopback(server: object, address: str) -> int:
        port: int = bind(server, address.replace("[::]", "127.0.0.1"))
        return port

    setattr(replica, name, bind_to_loopback)


def before_end(begins: Callable[[], object]) -> None:
    """Call ``begins`` when Serve asks this process's replica to end, in its event loop.

    Serve calls a deployment's own code when all requests are finished only.
    """
    from ray.serve._private.replica import Replica  # needed in replicas only, and its imports take time

    shut_down: Callable[[Replica], Awaitable[None]] = getattr(Replica, "_perform_graceful_shutdown")  # noqa: B009

    async def announced(self: Replica) -> None:
        try:
            begins()
        finally:
            await shut_down(self)

    setattr(Replica, "_perform_graceful_shutdown", announced)  # noqa: B010


def route_in_this_loop(handle: DeploymentHandle[Any]) -> None:
    """Run the router of a new ``handle`` in its caller's event loop, which saves two thread switches per call."""
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]


def leave_replica(handle: DeploymentHandle[Any], replica: str) -> None:
    """Send no more requests through ``handle`` to the replica of this unique id, as after its death.

    They wait for another one. It is for a handle of ``route_in_this_loop``. Serve's controller may offer the replica
    again: a router with a set ``broken`` then leaves it out.
    """
    router = handle._router._asyncio_router.request_router  # type: ignore[union-attr]
    for replica_id in [one for one in router.curr_replicas if one.unique_id == replica]:
        getattr(router, "broken", set[str]()).add(replica)
        router.on_replica_actor_died(replica_id)


async def object_ref(response: Any) -> Any:
    """Return the reference of a handle's response once a replica has accepted the request."""
    return await response._to_object_ref()


async def object_ref_generator(response: Any) -> Any:
    """Return the generator of references of a streaming response once a replica has accepted the request."""
    return await response._to_object_ref_gen()


def head_id() -> str:
    """Return the id of the cluster's head, as Serve finds it. Serve ends replicas there last."""
    return get_head_node_id()


def _client() -> Any:
    return _get_global_client(raise_if_no_controller_running=False)


def _controller() -> Any:
    client = _client()
    return None if client is None else client._controller
