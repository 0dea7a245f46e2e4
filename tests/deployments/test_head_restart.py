"""The head of a cluster dies and returns: with its state in Redis, gangs on other nodes outlive it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.application import kill_all_in
from benchmarks.serving.fake_nodes import OBJECT_STORE_BYTES
from benchmarks.serving.nodes import HOST, RAY, ROOT
from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.cli.serving import reserved_port
from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.commands import Command, command, short_folder
from tests.deployments.support.fake_nodes import FakeNodes
from tests.deployments.support.live import config_of, is_healthy, picture, pixels_of, wait_until
from tests.support.patience import PATIENCE_S
from tests.support.ports import own_port

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="needs Redis (Debian: apt-get install redis-server)"
    ),
]

MODELS = {"pictures": ROOT / "pipelines" / "checkpoints" / "flux-shapes"}
GANGS = "Denoiser-pictures"
START_S = 3 * PATIENCE_S
"""Time for a whole cluster to start on busy cores."""


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Yield the address of a Redis server for the test."""
    port = own_port(f"redis in {folder}")
    flags = ("--bind", HOST, "--port", str(port), "--save", "", "--dir", str(folder))
    server = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL)
    try:
        yield f"{HOST}:{port}"
    finally:
        server.kill()
        server.wait()


@contextmanager
def ended(folder: Path) -> Iterator[None]:
    """Let all nodes write to one folder. Kill what is left of them at the end of the block."""
    try:
        yield
    finally:
        kill_all_in(folder)


@contextmanager
def node(folder: Path, redis_address: str, *flags: str) -> Iterator[Command]:
    folder.mkdir(exist_ok=True)
    environment = {
        **SERVE_ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
        "RAY_REDIS_ADDRESS": redis_address,
        "RAY_external_storage_namespace": "troupe",
        "RAY_prestart_worker_first_driver": "0",
    }
    common = ("--block", "--include-log-monitor=False", f"--object-store-memory={OBJECT_STORE_BYTES}")
    with command("start", *flags, *common, folder=folder, env=environment, program=RAY) as started:
        started.wait_for("Ray runtime started")
        yield started


def kill_tree(command: Command) -> None:
    """Kill a node with SIGKILL: its processes are the command's own children, or those of their raylet."""
    parent = psutil.Process(command.pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_gangs_outlive_the_head_whose_state_is_in_redis(ray_cluster: None) -> None:
    with short_folder() as folder, redis(folder) as address, reserved_port(HOST) as port, ended(folder):
        cluster = FakeNodes(
            folder=folder,
            dashboard=f"http://{HOST}:{own_port(f'dashboard in {folder}')}",
            address=f"{HOST}:{own_port(f'cluster in {folder}')}",
        )
        ports = (f"--port={cluster.address.split(':')[1]}", f"--dashboard-port={cluster.dashboard.split(':')[2]}")
        head = ("--head", *ports, "--num-cpus=8", f"--temp-dir={folder}", "--dashboard-agent-listen-port=0")
        url = f"http://{HOST}:{port}"
        config = config_of(MODELS, num_ranks=1, cpus_per_rank=20).with_http(port=port)
        with node(folder / "head", address, *head) as first:
            worker = (f"--address={cluster.address}", "--num-cpus=24", "--dashboard-agent-listen-port=0")
            with node(folder / "worker", address, *worker):
                cluster.deploy(config)
                wait_until(lambda: is_healthy(url), "the application is ready", patience_s=START_S)
                before = picture(url, seed=1)
                gangs, pids = cluster.gangs(GANGS), cluster.rank_pids("pictures")
                kill_tree(first)
                # By this file, and the other node's raylet on the same machine, Ray would find a running head.
                (folder / "ray_current_cluster").unlink()
                with node(folder / "again", address, *head):
                    wait_until(lambda: is_healthy(url), "it is back", patience_s=START_S)
                    assert picture(url, seed=1) == before
                    assert_same_picture(pixels_of(before), bare_frames(MODELS, seed=1)[0])
                    assert cluster.gangs(GANGS) == gangs
                    assert all(map(psutil.pid_exists, pids[-1]))
                    assert cluster.rank_pids("pictures") == pids, "no gang has started since"
