"""A real cluster beside the simulated one: Ray's autoscaler on fake nodes, under a load that rises and falls.

    python -m benchmarks.simulate_cluster.fake_cluster [--waves 1] [--wave-s 120] [--load 1.2] [--seed 1]

Nodes are processes of this machine, gangs have one CPU rank each and paint with a shipped model. Arrivals, starts of
nodes and gangs, and waits are recorded. Then the simulation runs with the same arrivals and the measured times of steps
and starts. The last line is one JSON document with both and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import httpx

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # read when Ray is imported

from benchmarks.load.client import Outcome, send_all
from benchmarks.load.mix import Arrival, Mix, RequestClass
from benchmarks.serving.fake_nodes import FakeCluster, fake_cluster
from benchmarks.serving.known_steps import BUILD_APP, STEP_S
from benchmarks.serving.nodes import HOST, ROOT
from benchmarks.simulate_cluster.cluster import Cluster, ClusterSpec
from benchmarks.simulate_cluster.replicas import Picture
from benchmarks.simulate_cluster.strategies import ByWork, Observed
from deployments.cli.serving import parse_config, reserved_port
from deployments.forked_workers import forking_cluster
from engines.gang.autoscaling import ScalingRules

RECORDED = Path(__file__).parent / "traces"
"""Folder of the last lines of runs."""
MODEL, GANGS = "pictures", "Denoiser-pictures"
BODY = {"model": MODEL, "prompt": "a red circle"}
MIX = Mix(
    classes=(
        RequestClass(name="short", share=70, body={**BODY, "size": "64x64", "num_inference_steps": 12}),
        RequestClass(name="long", share=30, body={**BODY, "size": "64x64", "num_inference_steps": 36}),
    )
)
STEPS = {one.name: int(one.body["num_inference_steps"]) for one in MIX.classes}
RULES = ScalingRules(target_wait_s=3.0, min_gangs=0, max_gangs=3, idle_s=5.0)
IDLE_TIMEOUT_S = 5.0
"""A node without work ends after so long."""
LOOK_EVERY_S = 0.5
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
    """What was seen of a cluster."""

    begin_s: float = 0.0
    gangs: dict[str, GangRecord] = field(default_factory=dict)
    """All gangs in order of appearance."""
    nodes_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When each node was seen first and last."""
    moments: list[tuple[float, int, int]] = field(default_factory=list)
    """Time from ``begin_s``, number of running gangs and number of nodes, as in ``Observed``."""

    def look(self, cluster: FakeCluster, now_s: float) -> None:
        """Note the gangs and nodes of this moment."""
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
    recording, is_over = Recording(begin_s=time.time()), Event()

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            recording.look(cluster, time.time())

    thread = Thread(target=look)
    thread.start()
    try:
        yield recording
    finally:
        is_over.set()
        thread.join()


@contextmanager
def running_cluster() -> Iterator[tuple[FakeCluster, str]]:
    """Yield a cluster without gangs that has the model, and its URL."""
    scaling: dict[str, float] = {"min_replicas": RULES.min_gangs, "max_replicas": RULES.max_gangs}
    scaling |= {"target_wait_s": RULES.target_wait_s, "idle_s": RULES.idle_s}
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


def await_true(holds: Callable[[], bool], error: str, within_s: float) -> None:
    """Look every ``LOOK_EVERY_S`` until ``holds``. Raise ``TimeoutError`` with ``error`` after ``within_s``."""
    end_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{error} within {within_s:g} s")
        time.sleep(LOOK_EVERY_S)


def sent(url: str, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Send each at its time, from a thread of its own: a notebook's has a loop already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(send_all(url, arrivals, {}))).result()


def trace(num_waves: int, wave_s: float, load: float, seed: int) -> list[Arrival]:
    """Return a first request, and Poisson arrivals in waves whose middle keeps ``load`` gangs busy."""
    arrivals = [Arrival(at_s=FIRST_S, kind=MIX.classes[0], seed=0)]
    random, at_s, mean_s = Random(seed), 0.0, STEP_S * MIX.mean(STEPS)
    while (at_s := at_s + random.expovariate(load / mean_s)) < num_waves * (PAUSE_S + wave_s):
        into_s = at_s % (PAUSE_S + wave_s) - PAUSE_S
        if random.random() < (math.sin(math.pi * into_s / wave_s) ** 2 if into_s > 0 else 0.0):
            arrivals.append(Arrival(at_s=at_s, kind=MIX.drawn(random), seed=len(arrivals)))
    return arrivals


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run under the load, in the cluster or in the simulation."""

    latencies_s: Sequence[float]
    moments: Sequence[tuple[float, int, int]]
    num_starts: int

    def figures(self) -> dict[str, float]:
        """Return what is compared."""
        gangs_s, nodes_s = (self._sum_s(column) for column in (1, 2))
        ordered = sorted(self.latencies_s)
        return {
            "mean_latency_s": fmean(ordered),
            "p90_latency_s": ordered[int(0.9 * len(ordered))],
            "gang_s": gangs_s,
            "node_s": nodes_s,
            "num_starts": self.num_starts,
            "most_gangs": max(num for _, num, _ in self.moments),
        }

    def _sum_s(self, column: int) -> float:
        return sum(one[column] * (later[0] - one[0]) for one, later in pairwise(self.moments))


def measured(cluster: FakeCluster, url: str, arrivals: Sequence[Arrival]) -> tuple[Recording, list[Outcome]]:
    """Send the arrivals and record the cluster until all nodes are gone."""
    with recorded(cluster) as recording:
        outcomes = sent(url, arrivals)
        await_true(lambda: recording.moments[-1][1:] == (0, 0), "nodes are left", END_S)
    if not all(one.is_right for one in outcomes):
        raise RuntimeError(f"requests failed: {[one.status for one in outcomes]}")
    return recording, outcomes


def simulated(arrivals: Sequence[Arrival], times: Mapping[str, Any]) -> Run:
    """Return the run of the simulation with measured times."""
    spec = ClusterSpec(
        num_gpus=RULES.max_gangs,
        gpus_per_node=1,
        num_ranks=1,
        node_starts_s=times["node_starts_s"],
        gang_starts_s=times["gang_starts_s"],
        node_idle_s=times["node_idle_s"],
        failures_per_gpu_hour=0.0,
        min_gangs=RULES.min_gangs,
        measured_step_s=times["step_s"],
    )
    strategy = Observed(ByWork(RULES))
    cluster = Cluster(spec, strategy)
    pictures = [Picture(one.at_s, one.kind.name, STEPS[one.kind.name]) for one in arrivals]
    cluster.run(pictures, warm_gangs=0)
    latencies_s = [latency_s + times["beside_s"] for latency_s in cluster.latencies_s]
    return Run(latencies_s=latencies_s, moments=strategy.moments, num_starts=cluster.num_starts)


def times_of(recording: Recording, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the measured times: of a step by kind, of starts, and beside the steps of a request.

    Steps count with the gaps between them, which jobs that nothing overtakes show.
    """
    gap = median(one.stages_ms["denoise"] / 1e3 / one.gpu_s for one in outcomes)
    step_s = {name: gap * median(one.gpu_s for one in outcomes if one.name == name) / STEPS[name] for name in STEPS}
    beside_s = median(one.latency_s - (one.stages_ms["queue"] + one.stages_ms["denoise"]) / 1e3 for one in outcomes)
    return {"step_s": step_s, "beside_s": beside_s, **recording.starts()}


def changes(moments: Sequence[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Return the moments that differ from the one before, and the last one."""
    return [
        one for one, before in zip(moments, [None, *moments], strict=False) if before is None or one[1:] != before[1:]
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run of the cluster and its simulation."""

    arrivals: Sequence[Arrival]
    times: Mapping[str, Any]
    real: Run
    simulated: Run

    @property
    def latencies_s(self) -> list[tuple[float, str, float]]:
        """Arrival, kind and latency of each request of the cluster."""
        return [
            (one.at_s, one.kind.name, latency_s)
            for one, latency_s in zip(self.arrivals, self.real.latencies_s, strict=True)
        ]

    def document(self) -> dict[str, Any]:
        """Return what was measured, figures of both runs and their ratios, as JSON values."""
        real, simulation = self.real.figures(), self.simulated.figures()
        return {
            "latencies_s": self.latencies_s,
            "moments": changes(self.real.moments),
            "times": dict(self.times),
            "real": real,
            "simulated": simulation,
            "ratio": {name: value / real[name] for name, value in simulation.items()},
        }


def compare(num_waves: int, wave_s: float, load: float, seed: int) -> Comparison:
    """Run the cluster under the load, and the simulation with what was measured."""
    arrivals = trace(num_waves, wave_s, load, seed)
    with running_cluster() as (cluster, url):
        recording, outcomes = measured(cluster, url, arrivals)
    times = times_of(recording, outcomes)
    real = Run(
        latencies_s=[one.latency_s for one in outcomes],
        moments=recording.moments,
        num_starts=sum(gang.ready_s is not None for gang in recording.gangs.values()),
    )
    return Comparison(
        arrivals=arrivals,
        times=times,
        real=real,
        simulated=simulated(arrivals, times),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--wave-s", type=float, default=120.0)
    parser.add_argument("--load", type=float, default=1.2, help="gangs that the middle of a wave keeps busy")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    document = compare(arguments.waves, arguments.wave_s, arguments.load, arguments.seed).document()
    for name in document["ratio"]:
        real, simulation, ratio = (document[one][name] for one in ("real", "simulated", "ratio"))
        print(f"{name:16} {real:9.3f} in the cluster, {simulation:9.3f} simulated: {ratio:.2f}", file=sys.stderr)
    print(json.dumps({**vars(arguments), **document}))


if __name__ == "__main__":
    main()
