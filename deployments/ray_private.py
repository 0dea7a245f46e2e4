"""Every private name of Ray that the project uses, one function each. Written for Ray 2.60.

``tests/deployments/test_ray_private.py`` has a test of each against the installed Ray.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from deployments.names import APPLICATION

OPTIONAL_SERVERS = ("start_log_monitor", "start_monitor", "start_api_server")
"""The methods of Ray's node that start the readers of all logs, the autoscaler and the dashboard."""


def init_local(temp_dir: Path, system_config: Mapping[str, Any], **options: Any) -> None:
    """Start a cluster whose files are in ``temp_dir``, whatever RAY_ADDRESS says. ``options`` are ``ray.init``'s."""
    ray.init(address="local", _temp_dir=str(temp_dir), _system_config=dict(system_config), **options)


@contextmanager
def worker_setup_script(script: Path) -> Iterator[None]:
    """Have a node that starts inside the block set up its Python workers by ``script``.

    Ray joins the name of its own script to a folder, which an absolute path replaces (``Node.__init__``). Ray's script
    imports all of Ray in each worker before the worker itself does.
    """
    own = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = str(script)
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = own


@contextmanager
def without_optional_servers() -> Iterator[None]:
    """Have a node that starts inside the block do without ``OPTIONAL_SERVERS``: seconds of CPU time at its start.

    Ray has options for two of them, on its command line alone (``--include-log-monitor``, ``--no-monitor``).
    """
    before = {name: getattr(Node, name) for name in OPTIONAL_SERVERS}
    for name in OPTIONAL_SERVERS:
        setattr(Node, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, start in before.items():
            setattr(Node, name, start)


@contextmanager
def processes_in_own_sessions() -> Iterator[None]:
    """Start each of Ray's processes inside the block, and all its children, as the leader of a session.

    Ctrl-C in a terminal, ``timeout`` and supervisors signal a whole group of processes. The server ends its cluster in
    order; one that is gone by then makes it wait for a minute. Ray has no option for that. Elsewhere than on Linux
    nothing changes: there Ray ends its processes by their group when the server is killed.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before: Any = services.ConsolePopen

    class InOwnSession(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, start_new_session=True, **kwargs)

    setattr(services, "ConsolePopen", InOwnSession)  # noqa: B010
    try:
        yield
    finally:
        setattr(services, "ConsolePopen", before)  # noqa: B010


def quiet_logs(log: Callable[[str], None]) -> None:
    """Give ``log`` what Ray prints of its processes that died, and drop what it logs at every start.

    Ray prints whatever ``log_to_driver`` says (``listen_error_messages``).
    """

    def print_to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        lines: Sequence[object] = data["lines"]
        log(" ".join(map(str, lines)))

    setattr(worker, "print_to_stdstream", print_to_log)  # noqa: B010
    worker.logger.setLevel(logging.WARNING)
    authentication = logging.getLogger("ray._private.authentication.authentication_token_setup")
    authentication.addFilter(lambda record: "is enabled" not in record.getMessage())


def controller_answers(within_s: float) -> bool:
    """Return whether Serve's controller answers a call in time. False where there is no Serve."""
    controller = _controller()
    if controller is None:
        return False
    ready, _ = ray.wait([controller.check_alive.remote()], timeout=within_s)
    return bool(ready)


def restart_controller() -> None:
    """Kill the process of Serve's controller. Ray starts another, which goes on from what the first one has kept."""
    controller = _controller()
    if controller is not None:
        ray.kill(controller, no_restart=False)


def application_status(name: str = APPLICATION) -> ApplicationStatusOverview | None:
    """Return what ``serve.status()`` says of the application; None without Serve or such an application.

    ``serve.status()`` also checks the configuration of each deployment, for which Ray pickles classes: 6 ms of CPU time
    each, at every call.
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


def _deployment_status(deployment: Mapping[str, Any]) -> DeploymentStatusOverview:
    states = Counter(ReplicaState(one["state"]) for one in deployment["replicas"])
    return DeploymentStatusOverview(
        status=DeploymentStatus(deployment["status"]),
        status_trigger=DeploymentStatusTrigger(deployment["status_trigger"]),
        replica_states=dict(states),
        message=deployment["message"],
    )


def serve_host() -> str:
    """Return the host name or address at which Serve's proxies listen. Blocks; not for an event loop."""
    client = _client()
    assert client is not None, "Serve does not run"
    return str(client.http_config.host)


def bind_replicas_to_loopback() -> None:
    """Bind the port at which replicas of this process are called to 127.0.0.1, before its deployment is initialized.

    Ray opens it on all interfaces, unpickles what comes from anywhere (``Replica._on_initialized``), and has no setting
    for that.
    """
    from ray.serve._private import replica  # replicas alone have it, and its imports take time

    name = "add_port_to_grpc_server"
    bind = getattr(replica, name)

    def bind_to_loopback(server: object, address: str) -> int:
        port: int = bind(server, address.replace("[::]", "127.0.0.1"))
        return port

    setattr(replica, name, bind_to_loopback)


def route_in_this_loop(handle: DeploymentHandle[Any]) -> None:
    """Run the router of a new ``handle`` in the event loop of its caller, which saves two changes of threads a call."""
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]


async def object_ref(response: Any) -> Any:
    """Return the reference of a handle's response once a replica has taken the request."""
    return await response._to_object_ref()


async def object_ref_generator(response: Any) -> Any:
    """Return the generator of references of a streaming response once a replica has taken the request."""
    return await response._to_object_ref_gen()


def _client() -> Any:
    return _get_global_client(raise_if_no_controller_running=False)


def _controller() -> Any:
    client = _client()
    return None if client is None else client._controller
