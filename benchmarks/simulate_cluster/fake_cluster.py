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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from threading import Event, Thread
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # read when Ray is imported

from benchmarks.load.client import Outcome, send_all
from benchmarks.load.mix import Arrival, Mix, RequestClass
from benchmarks.simulate_cluster.cluster import Cluster, ClusterSpec
from benchmarks.simulate_cluster.replicas import Picture
from benchmarks.simulate_cluster.strategies import ByWork, Observed
from deployments.cli.serving import parse_config, reserved_port
from deployments.forked_workers import forking_cluster
from engines.gang.autoscaling import ScalingRules
from tests.deployments.support.commands import short_folder
from tests.deployments.support.fake_nodes import HOST, ROOT, FakeNodes, fake_nodes
from tests.deployments.support.live import config_of, is_healthy, wait_until

RECORDED = Path(__file__).parent / "traces" / "fake_cluster.json"
"""The last line of a run."""
MODEL, GANGS = "pictures", "Denoiser-pictures"
ONE_A_NODE = {"num_ranks": 1, "cpus_per_rank": 40}
"""A gang for each node of the type gpu4."""
BODY = {"model": MODEL, "prompt": "a red circle"}
MIX = Mix(
    classes=(
        RequestClass(name="short", share=70, body={**BODY, "size": "64x64", "num_inference_steps": 24}),
        RequestClass(name="long", share=30, body={**BODY, "size": "64x64", "num_inference_steps": 72}),
    )
)
STEPS = {one.name: int(one.body["num_inference_steps"]) for one in MIX.classes}
RULES = ScalingRules(target_wait_s=3.0, min_gangs=0, max_gangs=3, idle_s=5.0)
IDLE_TIMEOUT_S = 5.0
"""A node without work ends after so long."""
LOOK_EVERY_S = 0.5
END_S = 180.0
"""Time for gangs and nodes to go."""
PAUSE_S = 120.0
"""Time between two waves of load: all gangs and nodes go."""


@dataclass(slots=True)
class GangRecord:
    """A gang of the real cluster. Times are those of ``time.time``."""

    ordered_s: float
    ready_s: float | None = None
    node_s: float | None = None
    """When its node began to run, if that was after its order."""
    ended_s: float | None = None


@dataclass(slots=True)
class Recording:
    """What was seen of a cluster."""

    begin_s: float = 0.0
    gangs: dict[str, GangRecord] = field(default_factory=dict)
    nodes_s: dict[str, float] = field(default_factory=dict)
    """When each node that runs was seen first."""
    moments: list[tuple[float, int, int]] = field(default_factory=list)
    """Time from ``begin_s``, number of running gangs and number of nodes, as in ``Observed``."""
    idle_s: list[float] = field(default_factory=list)
    """Seconds from the end of the last gang to that of its node."""

    def look(self, cluster: FakeNodes, now_s: float) -> None:
        """Note the gangs and nodes of this moment."""
        replicas, nodes = cluster.replicas(GANGS), cluster.workers()
        self.nodes_s = {node.node_id: self.nodes_s.get(node.node_id, now_s) for node in nodes}
        running = {one["replica_id"] for one in replicas if one["state"] == "RUNNING"}
        for one in replicas:
            gang = self.gangs.setdefault(one["replica_id"], GangRecord(one["start_time_s"]))
            if one["state"] == "RUNNING" and gang.ready_s is None:
                node_s = self.nodes_s.get(one["node_id"], 0.0)
                gang.ready_s, gang.node_s = now_s, node_s if node_s > gang.ordered_s else None
        gone = [gang for name, gang in self.gangs.items() if name not in {one["replica_id"] for one in replicas}]
        for gang in gone:
            gang.ended_s = gang.ended_s or now_s
        if self.moments and len(nodes) < self.moments[-1][2]:
            self.idle_s += [now_s - max(gang.ended_s for gang in gone if gang.ended_s)] if gone else []
        self.moments.append((now_s - self.begin_s, len(running), len(nodes)))

    def starts(self) -> dict[str, Any]:
        """Return seconds: starts of nodes and of gangs on them, in order, and the mean of nodes without a gang."""
        gangs = sorted(self.gangs.values(), key=lambda gang: gang.ordered_s)
        ready = [(gang, gang.ready_s) for gang in gangs if gang.ready_s is not None]
        nodes_s = [gang.node_s - gang.ordered_s for gang, _ in ready if gang.node_s is not None]
        return {
            "node_starts_s": nodes_s,
            "gang_starts_s": [ready_s - (gang.node_s or gang.ordered_s) for gang, ready_s in ready],
            "node_idle_s": fmean(self.idle_s) if self.idle_s else IDLE_TIMEOUT_S,
        }


@contextmanager
def recorded(cluster: FakeNodes) -> Iterator[Recording]:
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
def running_cluster() -> Iterator[tuple[FakeNodes, str]]:
    """Yield a cluster without gangs that has the model, and its URL. Its gangs know how long steps take."""
    document = config_of({MODEL: ROOT / "pipelines" / "checkpoints" / "flux-shapes"}).model_dump(mode="json")
    (model,) = document["applications"][0]["args"]["models"]
    scaling: dict[str, float] = {"min_replicas": RULES.min_gangs, "max_replicas": RULES.max_gangs}
    scaling |= {"target_wait_s": RULES.target_wait_s, "idle_s": RULES.idle_s}
    model["denoiser"] |= {**ONE_A_NODE, "autoscaling": scaling}
    model["stages"] = "together"
    with (
        forking_cluster(),
        short_folder() as folder,
        fake_nodes(folder, idle_timeout_s=IDLE_TIMEOUT_S) as cluster,
        reserved_port(HOST) as port,
    ):
        cluster.deploy(parse_config(document).with_http(port=port))
        url = f"http://{HOST}:{port}"
        wait_until(lambda: is_healthy(url), "the application is ready, without a gang")
        yield cluster, url


def sent(url: str, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Send each at its time, from a thread of its own: a notebook's has a loop already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(send_all(url, arrivals, {}))).result()


def warmed_up(url: str) -> dict[str, Outcome]:
    """Return the last of three answers to each kind of request, one after the other."""
    last = {}
    for _ in range(3):
        for kind in MIX.classes:
            (last[kind.name],) = sent(url, [Arrival(at_s=0.0, kind=kind, seed=0)])
    return last


def waves(num: int, wave_s: float, load: float, mean_s: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals of ``mean_s`` each, which keep ``load`` gangs busy in the middle of each wave."""
    random, at_s, arrivals = Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + random.expovariate(load / mean_s)) < num * (wave_s + PAUSE_S):
        into_s = at_s % (wave_s + PAUSE_S)
        height = math.sin(math.pi * into_s / wave_s) ** 2 if into_s < wave_s else 0.0
        if random.random() < height:
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


def measured(cluster: FakeNodes, url: str, arrivals: Sequence[Arrival]) -> tuple[Recording, list[Outcome]]:
    """Send the arrivals and record the cluster until all nodes are gone."""
    with recorded(cluster) as recording:
        outcomes = sent(url, arrivals)
        wait_until(lambda: recording.moments[-1][1:] == (0, 0), "no node but the head", patience_s=END_S)
    assert all(one.is_right for one in outcomes), "a request failed"
    return recording, outcomes


def simulated(arrivals: Sequence[Arrival], times: Mapping[str, Any]) -> Run:
    """Return the run of the simulation with measured times."""
    spec = ClusterSpec(
        num_gpus=RULES.max_gangs,
        gpus_per_node=1,
        num_ranks=1,
        measured_node_starts_s=times["node_starts_s"],
        measured_starts_s=times["gang_starts_s"],
        node_idle_s=times["node_idle_s"],
        failures_per_gpu_hour=0.0,
        min_gangs=RULES.min_gangs,
        measured_step_s=times["step_s"],
    )
    strategy = Observed(ByWork(RULES))
    cluster = Cluster(spec, strategy)
    pictures = [
        Picture(one.at_s, one.kind.name, STEPS[one.kind.name], pace)
        for one, pace in zip(arrivals, times["paces"], strict=True)
    ]
    cluster.run(pictures, warm_gangs=0)
    latencies_s = [latency_s + times["beside_s"] for latency_s in cluster.latencies_s]
    return Run(latencies_s=latencies_s, moments=strategy.moments, num_starts=cluster.num_starts)


def times_of(recording: Recording, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the measured times: of a step by kind, of starts, and beside the steps of a request.

    A step of a kind is the median of its requests. ``paces`` has each request's own steps as a multiple of it: this
    machine's speed changes. Steps count with the gaps between them, which jobs that nothing overtakes show.
    """
    gap = median(one.stages_ms["denoise"] / 1e3 / one.gpu_s for one in outcomes)
    step_s = {name: gap * median(one.gpu_s for one in outcomes if one.name == name) / STEPS[name] for name in STEPS}
    paces = [gap * one.gpu_s / STEPS[one.name] / step_s[one.name] for one in outcomes]
    beside_s = median(one.latency_s - (one.stages_ms["queue"] + one.stages_ms["denoise"]) / 1e3 for one in outcomes)
    return {"step_s": step_s, "paces": paces, "beside_s": beside_s, **recording.starts()}


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
    with running_cluster() as (cluster, url):
        alone = warmed_up(url)
        wait_until(lambda: not cluster.workers(), "no node but the head")
        mean_s = MIX.mean({name: one.gpu_s for name, one in alone.items()})
        arrivals = waves(num_waves, wave_s, load, mean_s, seed)
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
