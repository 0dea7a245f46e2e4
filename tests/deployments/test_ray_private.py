"""Each private name of Ray in use exists in the installed Ray: after an upgrade this file says what is gone."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_deploy_args
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.handle import DeploymentHandle

from deployments.cli.cluster import LOCAL_SYSTEM
from deployments.ray_private import (
    OPTIONAL_SERVERS,
    application_status,
    before_end,
    bind_replicas_to_loopback,
    controller_answers,
    deployment_names,
    head_id,
    leave_replica,
    log_folder,
    object_ref,
    object_ref_generator,
    processes_in_own_sessions,
    quiet_logs,
    restart_controller,
    route_in_this_loop,
    serve_host,
    with_version,
    without_optional_servers,
    worker_setup_script,
)
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S
from tests.support.processes import cmdline

NAME = "private"
NUM_CALLS = 20
"""If calls went to one of two replicas at random, all would go to one once in a million times."""


class Callee:
    def __init__(self) -> None:
        bind_replicas_to_loopback()

    async def num_open_ports(self) -> int:
        return num_open_ports()

    async def name(self) -> str:
        return serve.get_replica_context().replica_id.unique_id

    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number


class Caller:
    """A replica that calls another one. Ray binds its own port."""

    def __init__(self, callee: DeploymentHandle[Any]) -> None:
        route_in_this_loop(callee)
        self._callee: Any = callee

    async def routes_in_another_loop(self) -> bool:
        await self._callee.num_open_ports.remote()
        return bool(self._callee._is_router_running_in_separate_loop())

    async def references(self) -> tuple[bool, list[int]]:
        """Return whether a reference is one of Ray's, and the content of a stream's references."""
        reference = await object_ref(self._callee.num_open_ports.remote())
        stream = await object_ref_generator(self._callee.options(stream=True).count.remote(3))
        return isinstance(reference, ray.ObjectRef), [await item async for item in stream]

    async def names_after_leaving(self) -> tuple[str, list[str]]:
        """Return a replica that was left, and those that answer afterwards."""
        known = {left := await self._callee.name.remote()}
        while len(known) < 2:  # an update of replicas would bring the one back
            known.add(await self._callee.name.remote())
        leave_replica(self._callee, left)
        leave_replica(self._callee, "unknown")
        return left, [await self._callee.name.remote() for _ in range(NUM_CALLS)]

    async def num_open_ports(self) -> tuple[int, int]:
        """Return the numbers of this replica and of the other one."""
        return num_open_ports(), await self._callee.num_open_ports.remote()


def num_open_ports() -> int:
    """Return the number of ports on which this process listens on all interfaces."""
    connections = psutil.Process().net_connections("tcp")
    return sum(one.status == psutil.CONN_LISTEN and one.laddr.ip in ("::", "0.0.0.0") for one in connections)


@pytest.fixture(scope="module")
def caller(ray_cluster: None) -> Iterator[DeploymentHandle[Any]]:
    serve.start(proxy_location=ProxyLocation.Disabled, http_options=HTTPOptions(host="127.0.0.1"))
    deployment = serve.deployment(ray_actor_options={"num_cpus": 0.1})
    callee = deployment(Callee).options(num_replicas=2)
    yield serve.run(deployment(Caller).bind(callee.bind()), name=NAME, route_prefix=None)
    serve.shutdown()  # type: ignore[no-untyped-call]


def test_a_handle_routes_in_the_loop_of_its_caller(caller: DeploymentHandle[Any]) -> None:
    assert caller.routes_in_another_loop.remote().result(timeout_s=PATIENCE_S) is False


def test_responses_have_references(caller: DeploymentHandle[Any]) -> None:
    assert caller.references.remote().result(timeout_s=PATIENCE_S) == (True, [0, 1, 2])


def test_replicas_are_called_on_loopback_alone(caller: DeploymentHandle[Any]) -> None:
    usual, bound = caller.num_open_ports.remote().result(timeout_s=PATIENCE_S)
    assert usual - bound == 1


def test_a_replica_that_was_left_gets_no_more_calls(caller: DeploymentHandle[Any]) -> None:
    left, names = caller.names_after_leaving.remote().result(timeout_s=PATIENCE_S)
    assert len({left, *names}) == 2
    assert left not in names


def test_the_status_is_what_serve_says(caller: DeploymentHandle[Any]) -> None:
    wait_until(lambda: application_status(NAME) == serve.status().applications[NAME], "the two are one")
    status = application_status(NAME)
    assert status is not None
    assert status.status == "RUNNING"
    assert application_status("another") is None
    assert deployment_names(NAME) == status.deployments.keys()
    assert deployment_names("another") == frozenset()


def test_the_head_of_a_cluster_of_one_node_is_that_node(caller: DeploymentHandle[Any]) -> None:
    assert head_id() == ray.get_runtime_context().get_node_id()


def test_serve_says_where_it_listens(caller: DeploymentHandle[Any]) -> None:
    assert serve_host() == "127.0.0.1"


def test_a_controller_that_was_restarted_answers(caller: DeploymentHandle[Any]) -> None:
    assert controller_answers(PATIENCE_S)
    before = controllers()
    restart_controller()
    wait_until(lambda: controllers() - before and controller_answers(1.0), "another controller answers")
    wait_until(lambda: application_status(NAME) == serve.status().applications[NAME], "it knows the application")


def controllers() -> set[int]:
    processes = psutil.Process().children(recursive=True)
    return {one.pid for one in processes if "ServeController" in " ".join(cmdline(one))}


def ray_commands() -> str:
    """Return the command lines of the processes that ``ray.init`` started."""
    return "\n".join(" ".join(cmdline(one)) for one in psutil.Process().children())


def test_a_cluster_has_its_files_and_settings(ray_cluster: None) -> None:
    assert "--temp_dir=/tmp/troupe_ray_" in ray_commands() or "--temp-dir=/tmp/troupe_ray_" in ray_commands()
    (config,) = set(re.findall(r"--config_list=(\S+)", ray_commands()))
    assert json.loads(base64.b64decode(config)).items() >= LOCAL_SYSTEM.items()


def test_the_agent_of_a_node_takes_any_free_port(ray_cluster: None) -> None:
    """Another process may have a fixed port, and then the agent starts late and without it."""
    assert set(re.findall(r"--listen-port=(\d+)", ray_commands())) == {"0"}


def test_workers_log_to_the_folder(ray_cluster: None) -> None:
    @ray.remote
    def write() -> int:
        os.write(2, b"a word\n")
        return os.getpid()

    pid = ray.get(write.remote())
    folder = log_folder()
    assert folder is not None
    (log,) = folder.glob(f"worker-*-{pid}.err")
    assert "a word\n" in log.read_text()


def test_workers_are_set_up_by_the_script(ray_cluster: None) -> None:
    own = ray_constants.SETUP_WORKER_FILENAME
    with worker_setup_script(Path("other.py")):
        assert ray_constants.SETUP_WORKER_FILENAME == "other.py"
    assert own == ray_constants.SETUP_WORKER_FILENAME
    pid = ray.get(ray.remote(num_cpus=0.1)(lambda: os.getpid()).remote())
    assert "deployments.zygote" in psutil.Process(pid).parent().cmdline(), "the session's cluster has a script"


def test_a_node_does_without_optional_servers(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name in ("log_monitor.py", "monitor.py", "dashboard.py") if name in ray_commands()] == []
    started: list[str] = []
    for name in OPTIONAL_SERVERS:
        assert hasattr(Node, name), "Ray calls it otherwise now"
        monkeypatch.setattr(Node, name, lambda node, name=name: started.append(name))
    node: Any = Node.__new__(Node)
    with without_optional_servers():
        for name in OPTIONAL_SERVERS:
            getattr(node, name)()
    assert started == []
    with pytest.raises(ZeroDivisionError), without_optional_servers():
        raise ZeroDivisionError
    for name in OPTIONAL_SERVERS:
        getattr(node, name)()
    assert started == list(OPTIONAL_SERVERS)


def test_what_ray_starts_is_in_no_group_of_ours() -> None:
    before = services.ConsolePopen
    with processes_in_own_sessions():
        nowhere: Any = subprocess.DEVNULL  # Ray passes it on
        info = services.start_ray_process(["sleep", "60"], "test", fate_share=True, stdout_file=nowhere)
    try:
        assert os.getsid(info.process.pid) == info.process.pid
        assert os.getpgid(info.process.pid) != os.getpgid(0)
    finally:
        info.process.kill()
        info.process.wait()
    assert services.ConsolePopen is before


def test_what_ray_prints_is_logged(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # restored at the end
    token = logging.getLogger("ray._private.authentication.authentication_token_setup")
    monkeypatch.setattr(token, "filters", [])
    texts: list[str] = []
    quiet_logs(texts.append)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(ray.remote(num_cpus=0.1, max_retries=0)(lambda: os._exit(1)).remote())
    wait_until(lambda: any("died" in text or "crashed" in text for text in texts), "Ray tells of a process that died")
    assert not worker.logger.isEnabledFor(logging.INFO)
    record = logging.LogRecord(token.name, logging.INFO, "", 0, "Token authentication is enabled", None, None)
    assert not token.filter(record)


class Ending:
    """Records the request to end, and ends with its last request."""

    def __init__(self) -> None:
        self._ends = asyncio.Event()
        before_end(self._ends.set)

    async def words(self) -> AsyncIterator[str]:
        yield "here"
        await self._ends.wait()
        yield "it ends"


def test_a_replica_hears_of_its_end_before_its_requests_are_finished(caller: DeploymentHandle[Any]) -> None:
    deployment = serve.deployment(ray_actor_options={"num_cpus": 0.1}, graceful_shutdown_timeout_s=PATIENCE_S)
    handle: Any = serve.run(deployment(Ending).bind(), name="ending", route_prefix=None)
    words = handle.options(stream=True).words.remote()
    assert next(words) == "here"
    serve.delete("ending", _blocking=False)
    assert next(words) == "it ends"


def test_a_deployment_keeps_its_own_version() -> None:
    deployment = with_version(serve.deployment(num_replicas=2)(Callee), "own").options(max_ongoing_requests=3)
    config = deployment._deployment_config
    sent = get_deploy_args("callee", deployment._replica_config, deployment_config=config, version="all")
    kept = DeploymentConfig.from_proto_bytes(sent["deployment_config_proto_bytes"])
    assert (kept.version, kept.num_replicas, kept.max_ongoing_requests) == ("own", 2, 3)
    plain: Any = serve.deployment(Callee)
    get_deploy_args("callee", plain._replica_config, deployment_config=plain._deployment_config, version="all")
    assert plain._deployment_config.version == "all", "Serve assigns another"
