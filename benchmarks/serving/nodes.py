"""A Ray cluster on one host whose nodes are processes, each with folders of its own for all that processes cache."""

from __future__ import annotations

import json
import os
import secrets
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.application import STOPPED_WITHIN_S, errors, free_port, wait_ready
from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.cli.local import MODE, TOKEN
from deployments.config import ServeConfig
from deployments.forked_workers import SHIM
from deployments.worker_shim import RAYLET_VARIABLE, WARM

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
RAY = (sys.executable, "-m", "ray.scripts.scripts")
SERVE = (sys.executable, "-m", "ray.serve.scripts")
STARTED = "Ray runtime started"
STARTED_WITHIN_S, READY_WITHIN_S = 60.0, 900.0
POLL_S = 0.1
OBJECT_STORE_BYTES = 512 * 2**20
CACHES: Mapping[str, str] = {
    "HOME": "home",
    "XDG_CACHE_HOME": "home/.cache",
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TROUPE_DATA_DIR": "data",
}
"""Variables that name places of files which processes keep, and the place of each below a node's folder."""


@dataclass(kw_only=True)
class Node:
    """A raylet and all that runs on it."""

    folder: Path
    """Folder of its caches."""
    process: subprocess.Popen[bytes]
    """`ray start --block`."""

    def warm(self) -> None:
        """Start what forks the node's workers, as the commands of a cluster file do."""
        (raylet,) = [one for one in psutil.Process(self.process.pid).children() if one.name() == "raylet"]
        environment = {**os.environ, RAYLET_VARIABLE: str(raylet.pid)}
        subprocess.run([sys.executable, str(SHIM), WARM], env=environment, check=True)

    def end(self) -> None:
        """Send SIGTERM to `ray start`, which ends all processes of the node."""
        end(self.process)


@dataclass(kw_only=True)
class Cluster:
    """A head without room for gangs, on which the application is served, and nodes that come and go."""

    folder: Path
    address: str
    variables: Mapping[str, str]
    """Environment of all nodes."""
    url: str = ""
    _nodes: list[Node] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        """Folder of the Ray session's logs, those of all nodes."""
        return self.folder / "ray" / "session_latest" / "logs"

    def add(self, *, num_cpus: int, num_gpus: int, variables: Mapping[str, str] | None = None) -> Node:
        """Start a node with empty caches. Return once it is part of the cluster."""
        options = {"address": self.address, "num-cpus": num_cpus, "num-gpus": num_gpus}
        node = self._start(f"node_{len(self._nodes)}", options, variables or {})
        self._nodes.append(node)
        return node

    def start_head(self, *, num_cpus: int, num_gpus: int) -> Node:
        options = {"port": self.address.rpartition(":")[2], "num-cpus": num_cpus, "num-gpus": num_gpus}
        flags = ("--head", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={self.folder / 'ray'}")
        return self._start("head", options, {"RAY_prestart_worker_first_driver": "0"}, flags)

    def end_nodes(self) -> None:
        for node in self._nodes:
            node.end()

    def _start(
        self, name: str, options: Mapping[str, object], variables: Mapping[str, str], flags: Sequence[str] = ()
    ) -> Node:
        folder = self.folder / name
        places = {variable: folder / place for variable, place in CACHES.items()}
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        options = {
            **options,
            "node-ip-address": HOST,
            "object-store-memory": OBJECT_STORE_BYTES,
            "dashboard-agent-listen-port": 0,
            "min-worker-port": 0,  # the system's choice: several nodes share its ports
            "max-worker-port": 0,
        }
        words = [*flags, *(f"--{key}={value}" for key, value in options.items())]
        environment = {**self.variables, **{key: str(place) for key, place in places.items()}, **variables}
        log = self.folder / f"{name}.log"
        process = spawn([*RAY, "start", "--block", *words], environment, log, self.folder)
        await_text(log, STARTED, process)
        return Node(folder=folder, process=process)


@contextmanager
def serving_on_nodes(config: ServeConfig, *, num_cpus: int, num_gpus: int, shared: Path) -> Iterator[Cluster]:
    """Serve ``config`` on a cluster that has only a head, with ``num_cpus`` and ``num_gpus``.

    Yield it when ``GET /health`` is 200. All nodes have the folder ``shared`` as their shared cache of kernels. All
    ends with the block. After an exception, the errors that processes logged are printed.
    """
    with tempfile.TemporaryDirectory(prefix="troupe_", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), free_port(HOST)
        file = folder / "config.yaml"
        document: dict[str, Any] = config.model_dump(mode="json")
        document["http_options"] |= {"host": HOST, "port": port}
        file.write_text(json.dumps(document))  # JSON is YAML
        variables = variables_of(shared)
        cluster = Cluster(folder=folder, address=f"{HOST}:{free_port(HOST)}", variables=variables)
        head = cluster.start_head(num_cpus=num_cpus, num_gpus=num_gpus)
        log = folder / "serve.log"
        server = spawn([*SERVE, "run", str(file), "--address", cluster.address], variables, log, folder)
        try:
            cluster.url = f"http://{HOST}:{port}"
            wait_ready(cluster.url, server, log, READY_WITHIN_S)
            yield cluster
        except BaseException:
            print(*errors(log, cluster.logs.glob("**/*.err")), sep="\n", file=sys.stderr, flush=True)
            raise
        finally:
            end(server)
            cluster.end_nodes()
            head.end()


def variables_of(shared: Path) -> dict[str, str]:
    """Return the environment of all nodes and of `serve run`, but for places of caches."""
    return {
        **os.environ,
        **SERVE_ENVIRONMENT,
        MODE: "token",
        TOKEN: secrets.token_hex(16),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUSERBASE": site.getuserbase(),  # else below the home folder, which nodes have for themselves
        "TROUPE_KERNEL_CACHE": str(shared.resolve()),
    }


def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own.

    Its ``folder`` has no sources: workers would import from it before all paths of their environment.
    """
    with log.open("w") as file:
        return subprocess.Popen(
            command, env=dict(environment), stdout=file, stderr=file, cwd=folder, start_new_session=True
        )


def await_text(log: Path, text: str, process: subprocess.Popen[bytes], within_s: float = STARTED_WITHIN_S) -> None:
    """Wait until ``process`` has written ``text``. RuntimeError if it ends before, TimeoutError after ``within_s``."""
    end_s = time.monotonic() + within_s
    while text not in log.read_text():
        if process.poll() is not None:
            raise RuntimeError(f"{log.stem} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        if time.monotonic() > end_s:
            raise TimeoutError(f"{log.stem} did not start within {within_s:g} s:\n{log.read_text()[-4000:]}")
        time.sleep(POLL_S)


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL to all of its session after ``STOPPED_WITHIN_S``."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOPPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
