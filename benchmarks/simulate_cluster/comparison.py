"""A run of real gangs beside its simulation: the load, what is measured, and what is compared."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.load.client import Outcome, send_all
from benchmarks.load.mix import Arrival, Mix, RequestClass
from benchmarks.serving.application import wait_until
from benchmarks.simulate_cluster.cluster import Cluster, ClusterSpec
from benchmarks.simulate_cluster.replicas import Picture
from benchmarks.simulate_cluster.strategies import ByWork, Observed
from engines.gang.autoscaling import ScalingRules

LOOK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Requests, and the gangs that answer them."""

    mix: Mix
    rules: ScalingRules
    gangs_per_node: int = 1

    @property
    def steps(self) -> dict[str, int]:
        """Number of steps of each class of requests."""
        return {one.name: int(one.body["num_inference_steps"]) for one in self.mix.classes}


def two_lengths(num_steps: int, **body: Any) -> Mix:
    """Return a mix of which 70 % take ``num_steps`` and 30 % three times as many."""
    return Mix(
        classes=(
            RequestClass(name="short", share=70, body={**body, "num_inference_steps": num_steps}),
            RequestClass(name="long", share=30, body={**body, "num_inference_steps": 3 * num_steps}),
        )
    )


def scaling_of(rules: ScalingRules) -> dict[str, float]:
    """Return ``rules`` as keys of ``denoiser.autoscaling``."""
    limits = {"min_replicas": rules.min_gangs, "max_replicas": rules.max_gangs}
    return {**limits, "target_wait_s": rules.target_wait_s, "idle_s": rules.idle_s}


def waves(mix: Mix, mean_s: float, *, num: int, wave_s: float, pause_s: float, load: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals in waves, each after a pause. A wave's middle keeps ``load`` gangs busy.

    ``mean_s``: seconds of a request alone, on average. ValueError if a class of requests never comes: the times of its
    steps would be missing.
    """
    arrivals, random, at_s = list[Arrival](), Random(seed), 0.0
    while (at_s := at_s + random.expovariate(load / mean_s)) < num * (pause_s + wave_s):
        into_s = at_s % (pause_s + wave_s) - pause_s
        if random.random() < (math.sin(math.pi * into_s / wave_s) ** 2 if into_s > 0 else 0.0):
            arrivals.append(Arrival(at_s=at_s, kind=mix.drawn(random), seed=len(arrivals) + 1))
    if missing := {one.name for one in mix.classes} - {one.kind.name for one in arrivals}:
        raise ValueError(
            f"{num} wave(s) of {wave_s:g} s have {len(arrivals)} requests of {mean_s:.1f} s each, and none that is "
            f"{' or '.join(sorted(missing))}: make waves longer, raise the load, or take another seed"
        )
    return arrivals


def sent(url: str, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Send each at its time, from a thread of its own: a notebook's has a loop already.

    RuntimeError if one fails.
    """
    with ThreadPoolExecutor(1) as thread:
        outcomes = thread.submit(lambda: asyncio.run(send_all(url, arrivals, {}))).result()
    if not all(one.is_right for one in outcomes):
        raise RuntimeError(f"requests failed: {[one.status for one in outcomes]}")
    return outcomes


def await_true(holds: Callable[[], bool], error: str, within_s: float) -> None:
    """Look every ``LOOK_EVERY_S`` until ``holds``. Raise ``TimeoutError`` with ``error`` after ``within_s``."""
    if not wait_until(holds, within_s, LOOK_EVERY_S):
        raise TimeoutError(f"{error} within {within_s:g} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run under the load, of real gangs or in the simulation."""

    latencies_s: Sequence[float]
    moments: Sequence[tuple[float, int, int]]
    """Time, number of running gangs and number of nodes, as in ``Observed``."""
    num_starts: int

    def after(self, at_s: float, num_requests: int) -> Run:
        """Return the part after ``at_s``, when ``num_requests`` are done. Starts are those that end in it."""
        _, num_gangs, num_nodes = max(one for one in self.moments if one[0] <= at_s)
        moments = [(at_s, num_gangs, num_nodes), *(one for one in self.moments if one[0] > at_s)]
        return Run(
            latencies_s=self.latencies_s[num_requests:],
            moments=moments,
            num_starts=sum(max(0, later[1] - one[1]) for one, later in pairwise(moments)),
        )

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


def simulated(arrivals: Sequence[Arrival], times: Mapping[str, Any], setting: Setting) -> Run:
    """Return the run of the simulation with measured times."""
    rules, steps = setting.rules, setting.steps
    spec = ClusterSpec(
        num_gpus=rules.max_gangs,
        gpus_per_node=setting.gangs_per_node,
        num_ranks=1,
        node_starts_s=times["node_starts_s"],
        gang_starts_s=times["gang_starts_s"],
        node_idle_s=times["node_idle_s"],
        failures_per_gpu_hour=0.0,
        min_gangs=rules.min_gangs,
        measured_step_s=times["step_s"],
    )
    strategy = Observed(ByWork(rules))
    cluster = Cluster(spec, strategy)
    pictures = [Picture(one.at_s, one.kind.name, steps[one.kind.name]) for one in arrivals]
    cluster.run(pictures, warm_gangs=0)
    latencies_s = [latency_s + times["beside_s"] for latency_s in cluster.latencies_s]
    return Run(latencies_s=latencies_s, moments=strategy.moments, num_starts=cluster.num_starts)


def step_times(outcomes: Sequence[Outcome], steps: Mapping[str, int]) -> dict[str, Any]:
    """Return the measured times: of a step by kind, and beside the steps of a request.

    Steps count with the gaps between them, which jobs that nothing overtakes show. "each_step_s" is the mean step of
    each request without gaps: if some are much longer than others, the simulation's steps are too even.
    """
    gap = median(one.stages_ms["denoise"] / 1e3 / one.gpu_s for one in outcomes)
    step_s = {name: gap * median(one.gpu_s for one in outcomes if one.name == name) / steps[name] for name in steps}
    beside_s = median(one.latency_s - (one.stages_ms["queue"] + one.stages_ms["denoise"]) / 1e3 for one in outcomes)
    each_step_s = [one.gpu_s / steps[one.name] for one in outcomes]
    return {"step_s": step_s, "beside_s": beside_s, "each_step_s": each_step_s}


def changes(moments: Sequence[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Return the moments that differ from the one before, and the last one."""
    return [
        one for one, before in zip(moments, [None, *moments], strict=False) if before is None or one[1:] != before[1:]
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run of real gangs and its simulation."""

    arrivals: Sequence[Arrival]
    times: Mapping[str, Any]
    real: Run
    simulated: Run

    @property
    def latencies_s(self) -> list[tuple[float, str, float]]:
        """Arrival, kind and latency of each real request."""
        return [
            (one.at_s, one.kind.name, latency_s)
            for one, latency_s in zip(self.arrivals, self.real.latencies_s, strict=True)
        ]

    def document(self) -> dict[str, Any]:
        """Return what was measured, figures of both runs and their ratios, as JSON values.

        Figures that are zero in the real run have no ratio: those of nodes where there is only one.
        """
        real, simulation = self.real.figures(), self.simulated.figures()
        return {
            "latencies_s": self.latencies_s,
            "moments": changes(self.real.moments),
            "times": dict(self.times),
            "real": real,
            "simulated": simulation,
            "ratio": {name: simulation[name] / value for name, value in real.items() if value},
        }


def print_comparison(arguments: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Print a line for each figure, then the JSON document."""
    for name in document["ratio"]:
        real, simulation, ratio = (document[one][name] for one in ("real", "simulated", "ratio"))
        print(f"{name:16} {real:9.3f} in the cluster, {simulation:9.3f} simulated: {ratio:.2f}", file=sys.stderr)
    print(json.dumps({**vars(arguments), **document}), flush=True)
