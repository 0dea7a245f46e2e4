"""A Ray cluster with the node types of ``ray_cluster.yaml`` on one machine.

Nodes are processes that Ray's own autoscaler starts and ends.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.util.state import list_actors

from benchmarks.serving.application import kill_all_in
from benchmarks.serving.nodes import HOST, RAY, ROOT, SERVE, STARTED, await_text, spawn
from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.config import ServeConfig

PORTS = range(20_000, 32_768)
"""Above those of Ray's workers, and below those that Linux gives to programs that ask for any."""
TIMEOUT_S, STARTED_WITHIN_S = 120.0, 180.0
OBJECT_STORE_BYTES = 80 * 2**20
ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    "RAY_enable_autoscaler_v2": "1",  # as `ray up` has it
    "RAY_health_check_period_ms": "500",  # else three seconds, of which five in a row make a node dead
    "RAY_prestart_worker_first_driver": "0",  # a process for each logical CPU
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A worker node. Its raylet is the parent of all that runs on it."""

    node_id: str
    node_type: str
    raylet: psutil.Process


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeCluster:
    """A running cluster."""

    folder: Path
    """Folder of all its files."""
    dashboard: str
    """URL where `serve deploy` finds it."""
    address: str
    """Address of its head."""

    def deploy(self, config: ServeConfig, *, import_path: str | None = None) -> None:
        """Run `serve deploy` with a file of ``config``. Return once Serve has taken it.

        ``import_path``: what builds the application in place of the configuration's own.
        """
        document: dict[str, Any] = config.model_dump(mode="json")
        if import_path is not None:
            document["applications"][0]["import_path"] = import_path
        file = self.folder / "config.yaml"
        file.write_text(json.dumps(document))  # JSON is YAML
        arguments = ("deploy", str(file), "--address", self.dashboard)
        subprocess.run([*SERVE, *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)

    def gangs(self, deployment: str) -> dict[str, str]:
        """Return the running replicas of a denoiser, each with the id of its node.

        There are none while Serve builds a new version.
        """
        return {one["replica_id"]: one["node_id"] for one in self.replicas(deployment) if one["state"] == "RUNNING"}

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Return Serve's reports of a deployment's replicas, also of those that start or end."""
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=TIMEOUT_S, trust_env=False).json()
        found = answer["applications"]["troupe"]["deployments"].get(deployment, {"replicas": []})
        replicas: list[dict[str, Any]] = found["replicas"]
        return replicas

    def workers(self) -> list[Node]:
        """Return the worker nodes that run, the oldest first."""
        nodes = [node for one in psutil.process_iter(["name"]) if (node := self._node(one)) is not None]
        return sorted((node for node in nodes if node.node_id != FAKE_HEAD_NODE_ID), key=lambda node: node.node_id)

    def drain(self, node_id: str, notice_s: int) -> None:
        """Tell Ray that the node ends in ``notice_s``, as for a preemption. It does not end."""
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        node = ("--address", self.address, "--node-id", node_id, "--deadline-remaining-seconds", str(notice_s))
        subprocess.run([*RAY, "drain-node", *node, *reason], check=True, capture_output=True, timeout=TIMEOUT_S)

    def kill(self, node: Node) -> None:
        """Send SIGKILL to all processes of a node at once, those of its ranks first."""
        pids = [pid for pid, node_id in self.nodes_of_ranks().items() if node_id == node.node_id]
        children = node.raylet.children(recursive=True) if node.raylet.is_running() else []
        for pid in (*pids, *(child.pid for child in children), node.raylet.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def nodes_of_ranks(self) -> dict[int, str]:
        """Return the ids of the nodes on which ranks run, by process id."""
        ranks = list_actors(address=self.dashboard, filters=[("class_name", "=", "Rank"), ("state", "=", "ALIVE")])
        return {rank.pid: rank.node_id for rank in ranks if rank.pid and rank.node_id}

    @property
    def logs(self) -> Path:
        """Folder of the session's logs, those of all nodes."""
        return self.folder / "session_latest" / "logs"

    def _node(self, process: psutil.Process) -> Node | None:
        try:
            if process.info["name"] != "raylet" or str(self.folder) not in " ".join(process.cmdline()):
                return None
            environment = process.environ()
        except psutil.Error:  # it has just ended
            return None
        if not environment:  # it is about to
            return None
        node_type = environment.get("RAY_NODE_TYPE_NAME", FAKE_HEAD_NODE_TYPE)
        return Node(node_id=environment["RAY_CLOUD_INSTANCE_ID"], node_type=node_type, raylet=process)


@contextmanager
def fake_cluster(folder: Path, *, idle_timeout_s: float) -> Iterator[FakeCluster]:
    """Start a cluster with its head alone. Nodes end after ``idle_timeout_s`` without work, and all with the block.

    Workers of all nodes are forked from the zygote of this process's environment (``forking_cluster``), if it has one.
    Otherwise each node imports the same libraries. ``ray.cluster_utils.AutoscalingCluster`` is no alternative: Ray's
    wheels lack a file that it reads, and it stops every Ray of the machine when it starts.
    """
    port, dashboard_port = _free_ports(2)
    cluster: dict[str, Any] = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    autoscaling = folder / "autoscaling.json"
    autoscaling.write_text(json.dumps(_autoscaling(cluster, f"{HOST}:{port}", idle_timeout_s)))
    options = {
        "port": port,
        "dashboard-port": dashboard_port,
        "dashboard-agent-listen-port": 0,
        "include-log-monitor": False,
        "autoscaling-config": autoscaling,
        "num-cpus": cluster["available_node_types"][cluster["head_node_type"]]["resources"]["CPU"],
        "object-store-memory": OBJECT_STORE_BYTES,
        "temp-dir": folder,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    with _head(flags, folder):
        yield FakeCluster(folder=folder, dashboard=f"http://{HOST}:{dashboard_port}", address=f"{HOST}:{port}")


@contextmanager
def _head(flags: Sequence[str], folder: Path) -> Iterator[None]:
    """Start a head that writes to ``folder``, and wait until it runs. All nodes are killed at the end of the block."""
    own = {"RAY_TMPDIR": str(folder), "TROUPE_DATA_DIR": str(folder / "data")}
    environment, log = {**os.environ, **SERVE_ENVIRONMENT, **ENVIRONMENT, **own}, folder / "start.log"
    process = spawn([*RAY, "start", "--head", "--block", *flags], environment, log, folder)
    try:
        await_text(log, STARTED, process, STARTED_WITHIN_S)
        yield
    finally:
        kill_all_in(folder)
        process.wait()


def _free_ports(num: int) -> list[int]:
    """Return different ports that nothing listens at."""
    ports = list[int]()
    while len(ports) < num:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.create_server((HOST, port)):
            ports += [port] * (port not in ports)
    return ports


def _autoscaling(cluster: Mapping[str, Any], gcs_address: str, idle_timeout_s: float) -> dict[str, Any]:
    """Return the content of ``cluster`` without GPUs, and with nodes that start without commands."""
    types = {
        FAKE_HEAD_NODE_TYPE if name == cluster["head_node_type"] else name: kind
        for name, kind in cluster["available_node_types"].items()
    }
    provider = {
        "type": "external",  # the type of this name wants the file that wheels lack
        "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
        "head_node_id": FAKE_HEAD_NODE_ID,
        "gcs_address": gcs_address,
        "launch_multiple": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    commands = [key for key in cluster if key.endswith("_commands")]
    return {
        **{key: cluster[key] for key in ("cluster_name", "max_workers", "upscaling_speed")},
        **{key: [] for key in (*commands, "initialization_commands")},
        "idle_timeout_minutes": idle_timeout_s / 60,
        "provider": provider,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": {name: _without_gpus(kind) for name, kind in types.items()},
    }


def _without_gpus(kind: Mapping[str, Any]) -> dict[str, Any]:
    resources = {"CPU": kind["resources"]["CPU"], "object_store_memory": OBJECT_STORE_BYTES}
    return {**kind, "resources": resources, "node_config": {}}
