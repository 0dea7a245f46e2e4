"""A Ray cluster of ``ray_cluster.yaml``'s node types in one machine: its nodes are processes that Ray's own autoscaler
starts and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
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

from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.config import ServeConfig
from tests.deployments.support.commands import command, config_file
from tests.deployments.support.live import TIMEOUT_S, log_lines, log_texts
from tests.support.ports import own_port

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.1"
RAY = (sys.executable, "-m", "ray.scripts.scripts")
SERVE = (sys.executable, "-m", "ray.serve.scripts")
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
class FakeNodes:
    """A running cluster. ``dashboard`` is the URL where `serve deploy` finds it, ``address`` that of its head."""

    folder: Path
    dashboard: str
    address: str

    def deploy(self, config: ServeConfig) -> None:
        """Runs `serve deploy` with a file of ``config``; returns once Serve has taken it."""
        arguments = ("deploy", config_file(config, self.folder), "--address", self.dashboard)
        subprocess.run([*SERVE, *arguments], check=True, capture_output=True, timeout=TIMEOUT_S)

    def gangs(self, deployment: str) -> dict[str, str]:
        """The running replicas of a denoiser, each with the id of its node; none while Serve builds a new version."""
        return {one["replica_id"]: one["node_id"] for one in self.replicas(deployment) if one["state"] == "RUNNING"}

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """What Serve says of the replicas of a deployment, those that start and end included."""
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=TIMEOUT_S).json()
        found = answer["applications"]["troupe"]["deployments"].get(deployment, {"replicas": []})
        replicas: list[dict[str, Any]] = found["replicas"]
        return replicas

    def workers(self) -> list[Node]:
        """The worker nodes that run, oldest first."""
        nodes = [node for one in psutil.process_iter(["name"]) if (node := self._node(one)) is not None]
        return sorted((node for node in nodes if node.node_id != FAKE_HEAD_NODE_ID), key=lambda node: node.node_id)

    def drain(self, node_id: str, notice_s: int) -> None:
        """Tell Ray that the node will be taken away in ``notice_s``, as who does so is told. It is not."""
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        node = ("--address", self.address, "--node-id", node_id, "--deadline-remaining-seconds", str(notice_s))
        subprocess.run([*RAY, "drain-node", *node, *reason], check=True, capture_output=True, timeout=TIMEOUT_S)

    def kill(self, node: Node) -> None:
        """Kill -9 of all processes of a node at once, those of its ranks first."""
        pids = [pid for pid, node_id in self.nodes_of_ranks().items() if node_id == node.node_id]
        children = node.raylet.children(recursive=True) if node.raylet.is_running() else []
        for pid in (*pids, *(child.pid for child in children), node.raylet.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def logged(self, message: str) -> list[dict[str, Any]]:
        """See ``log_lines``."""
        return log_lines(message, self._logs)

    def rank_pids(self, model: str) -> list[list[int]]:
        """The processes of each gang that was ready once, by rank; the newest gang is last."""
        return [line["pids"] for line in log_lines("gang is ready", self._logs) if line["model"] == model]

    def nodes_of_ranks(self) -> dict[int, str]:
        """The ids of the nodes on which ranks run, by process id."""
        ranks = list_actors(address=self.dashboard, filters=[("class_name", "=", "Rank"), ("state", "=", "ALIVE")])
        return {rank.pid: rank.node_id for rank in ranks if rank.pid and rank.node_id}

    def busy_nodes(self) -> set[str]:
        """The nodes that have ranks which have begun a job."""
        names = [name for name, text in log_texts(self._logs).items() if '"job begins"' in text]
        pids = {int(name.rsplit("-", 1)[1]) for name in names}
        return {node_id for pid, node_id in self.nodes_of_ranks().items() if pid in pids}

    def lost_requests(self) -> list[dict[str, Any]]:
        """The log lines of requests that were run again, or given up, since their gang was lost."""
        return [line for line in log_lines("request ", self._logs) if "lost its gang" in line["message"]]

    @property
    def _logs(self) -> Path:
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
def fake_nodes(folder: Path, *, idle_timeout_s: float) -> Iterator[FakeNodes]:
    """A cluster with its head alone; nodes go when they were idle for ``idle_timeout_s``. All ends with the block.

    Workers of all nodes are forked from the zygote of this process's environment (``forking_cluster``), if it has one:
    else each node would import the same libraries.

    ``ray.cluster_utils.AutoscalingCluster`` does the like, but Ray's wheels lack a file that it reads, and it stops
    every Ray of the machine when it starts.
    """
    port, dashboard_port = own_port(f"cluster in {folder}"), own_port(f"dashboard in {folder}")
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
    environment = {**SERVE_ENVIRONMENT, **ENVIRONMENT}
    # In another folder than the sources: workers would import from it before all that their environment names.
    with command("start", "--head", "--block", *flags, folder=folder, env=environment, program=RAY, cwd=folder) as head:
        head.wait_for("Ray runtime started")
        yield FakeNodes(folder=folder, dashboard=f"http://{HOST}:{dashboard_port}", address=f"{HOST}:{port}")


def _autoscaling(cluster: Mapping[str, Any], gcs_address: str, idle_timeout_s: float) -> dict[str, Any]:
    """What ``cluster`` says, but for GPUs, and with nodes that need no commands to be started."""
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
