"""A real cluster beside the simulated one: Ray's autoscaler on fake nodes, under a load that rises and falls.

    python -m benchmarks.simulate_cluster.fake_cluster [--waves 1] [--wave-s 120] [--load 1.2] [--seed 1]
    python -m benchmarks.simulate_cluster.fake_cluster --replay FILE

Nodes are processes of this machine, gangs have one CPU rank each and paint with a shipped model. Arrivals, starts of
nodes and gangs, and waits are recorded. Then the simulation runs with the same arrivals and the measured times of steps
and starts. The last line is one JSON document with both and their ratios.

``--replay`` simulates the run of such a document again, with all requests up to 0.9 s later than they were. It shows
how much depends on the moment of a decision, which no measurement tells.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import httpx

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # read when Ray is imported

from benchmarks.application.memory import samples_of
from benchmarks.load.client import Outcome
from benchmarks.load.mix import Arrival
from benchmarks.serving.fake_nodes import FakeCluster, fake_cluster
from benchmarks.serving.known_steps import BUILD_APP, STEP_S
from benchmarks.serving.nodes import HOST, ROOT
from benchmarks.simulate_cluster.comparison import (
    LOOK_EVERY_S,
    Comparison,
    Run,
    Setting,
    await_true,
    print_comparison,
    scaling_of,
    sent,
    simulated,
    step_times,
    two_lengths,
    waves,
)
from deployments.cli.serving import parse_config, reserved_port
from deployments.forked_workers import forking_cluster
from engines.gang.autoscaling import ScalingRules

RECORDED = Path(__file__).parent / "traces"
"""Folder of the last lines of runs."""
MODEL, GANGS = "pictures", "Denoiser-pictures"
SETTING = Setting(
    mix=two_lengths(12, model=MODEL, prompt="a red circle", size="64x64"),
    rules=ScalingRules(target_wait_s=3.0, min_gangs=0, max_gangs=3, idle_s=5.0),
)
IDLE_TIMEOUT_S = 5.0
"""A node without work ends after so long."""
READY_S, END_S = 60.0, 180.0
"""Time for the application to start, and for gangs and nodes to go."""
PAUSE_S = 90.0
"""Time before each wave: all gangs and nodes go."""
FIRST_S = 10.0
"""Time of a request before the first wave, from which gangs learn how long steps take."""


@dataclass(slots=True)
class GangRecord:
    """A gang of the real cluster. Times are those of ``time.time``."""

    ordered_s: float
    ready_s: float | None = None
    node_id: str = ""
    ended_s: float | None = None


@dataclass(slots=True)
class Recording:
    """Gangs and nodes of a cluster over time."""

    begin_s: float = 0.0
    gangs: dict[str, GangRecord] = field(default_factory=dict)
    """All gangs in order of appearance."""
    nodes_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Times at which each node was seen first and last."""
    moments: list[tuple[float, int, int]] = field(default_factory=list)
    """Time from ``begin_s``, number of running gangs and number of nodes, as in ``Observed``."""

    def look(self, cluster: FakeCluster, now_s: float) -> None:
        """Record the current gangs and nodes."""
        replicas = {one["replica_id"]: one for one in cluster.replicas(GANGS)}
        nodes = [node.node_id for node in cluster.workers()]
        self.nodes_s |= {name: (self.nodes_s.get(name, (now_s,))[0], now_s) for name in nodes}
        running = {name for name, one in replicas.items() if one["state"] == "RUNNING"}
        for name, one in replicas.items():
            gang = self.gangs.setdefault(name, GangRecord(one["start_time_s"]))
            if name in running and gang.ready_s is None:
                gang.ready_s, gang.node_id = now_s, one["node_id"]
        for name, gang in self.gangs.items():
            gang.ended_s = gang.ended_s or (None if name in replicas else now_s)
        self.moments.append((now_s - self.begin_s, len(running), len(nodes)))

    def starts(self) -> dict[str, Any]:
        """Return seconds: starts of nodes and of gangs on them, in order, and the mean of nodes without a gang."""
        node_starts_s, gang_starts_s, ended_s = list[float](), list[float](), dict[str, float]()
        for gang in sorted(self.gangs.values(), key=lambda one: one.ordered_s):
            if gang.ready_s is None:
                continue
            node_s = max(gang.ordered_s, self.nodes_s[gang.node_id][0])
            if node_s > gang.ordered_s:
                node_starts_s.append(node_s - gang.ordered_s)
            gang_starts_s.append(gang.ready_s - node_s)
            ended_s[gang.node_id] = max(ended_s.get(gang.node_id, 0.0), gang.ended_s or 0.0)
        idle_s = [self.nodes_s[name][1] - end_s for name, end_s in ended_s.items() if end_s]
        return {"node_starts_s": node_starts_s, "gang_starts_s": gang_starts_s, "node_idle_s": fmean(idle_s)}


@contextmanager
def recorded(cluster: FakeCluster) -> Iterator[Recording]:
    """Look at the cluster until the end of the block."""
    recording = Recording(begin_s=time.time())
    with samples_of(lambda: recording.look(cluster, time.time()), LOOK_EVERY_S):
        yield recording


@contextmanager
def running_cluster() -> Iterator[tuple[FakeCluster, str]]:
    """Yield a cluster without gangs that has the model, and its URL."""
    scaling = scaling_of(SETTING.rules)
    # A gang for each node of the type gpu4.
    gang = {"num_ranks": 1, "cpus_per_rank": 40, "engine": "torch", "ping_deadline_s": 30.0, "autoscaling": scaling}
    path = str(ROOT / "pipelines" / "checkpoints" / "flux-shapes")
    model = {"name": MODEL, "path": path, "stages": "together", "denoiser": gang}
    args = {"models": [model], "metrics": {"port": None}}
    application = {"name": "troupe", "import_path": "deployments.app:build_app", "args": args}
    with (
        forking_cluster(),
        TemporaryDirectory(prefix="troupe_", dir="/tmp", ignore_cleanup_errors=True) as folder,
        fake_cluster(Path(folder), idle_timeout_s=IDLE_TIMEOUT_S) as cluster,
        reserved_port(HOST) as port,
    ):
        document = {"http_options": {"port": port}, "applications": [application]}
        cluster.deploy(parse_config(document), import_path=BUILD_APP)
        url = f"http://{HOST}:{port}"
        await_true(lambda: _is_healthy(url), "the application is not ready", READY_S)
        yield cluster, url


def _is_healthy(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    return False


def trace(num_waves: int, wave_s: float, load: float, seed: int) -> list[Arrival]:
    """Return a first request, and those of waves."""
    mean_s = STEP_S * SETTING.mix.mean(SETTING.steps)
    first = Arrival(at_s=FIRST_S, kind=SETTING.mix.classes[0], seed=0)
    return [first, *waves(SETTING.mix, mean_s, num=num_waves, wave_s=wave_s, pause_s=PAUSE_S, load=load, seed=seed)]


def measured(cluster: FakeCluster, url: str, arrivals: Sequence[Arrival]) -> tuple[Recording, list[Outcome]]:
    """Send the arrivals and record the cluster until all nodes are gone."""
    with recorded(cluster) as recording:
        outcomes = sent(url, arrivals)
        await_true(lambda: recording.moments[-1][1:] == (0, 0), "nodes are left", END_S)
    return recording, outcomes


def compare(num_waves: int, wave_s: float, load: float, seed: int) -> Comparison:
    """Run the cluster under the load, and the simulation with the measured times."""
    arrivals = trace(num_waves, wave_s, load, seed)
    with running_cluster() as (cluster, url):
        recording, outcomes = measured(cluster, url, arrivals)
    times = {**step_times(outcomes, SETTING.steps), **recording.starts()}
    real = Run(
        latencies_s=[one.latency_s for one in outcomes],
        moments=recording.moments,
        num_starts=sum(gang.ready_s is not None for gang in recording.gangs.values()),
    )
    return Comparison(arrivals=arrivals, times=times, real=real, simulated=simulated(arrivals, times, SETTING))


def replays(document: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield delays of all requests, in seconds, and the ratios of the simulation with each to the real run."""
    for delay_s in (tenths / 10 for tenths in range(10)):
        arrivals = [
            Arrival(at_s=at_s + delay_s, kind=SETTING.mix.named(name), seed=0)
            for at_s, name, _ in document["latencies_s"]
        ]
        figures = simulated(arrivals, document["times"], SETTING).figures()
        yield delay_s, {name: figures[name] / value for name, value in document["real"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--wave-s", type=float, default=120.0)
    parser.add_argument("--load", type=float, default=1.2, help="gangs that the middle of a wave keeps busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="a document of an earlier run")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        for delay_s, ratios in replays(json.loads(arguments.replay.read_text().splitlines()[-1])):
            print(f"{delay_s:.1f} s later:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        return
    del arguments.replay
    document = compare(arguments.waves, arguments.wave_s, arguments.load, arguments.seed).document()
    print_comparison(arguments, document)


if __name__ == "__main__":
    main()
