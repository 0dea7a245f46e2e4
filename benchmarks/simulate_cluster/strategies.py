"""The compared strategies: scaling by predicted work, Ray Serve's request counting, and a fixed number of gangs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.simulate_cluster.cluster import Cluster, Strategy
from benchmarks.simulate_cluster.replicas import PictureJob, SimulatedReplica
from engines.gang.autoscaling import GangReport, GangScaler, Observation, ScalingRules
from engines.gang.load import REPLICAS_PER_REPORT_S, REPORT_EVERY_S, LoadBoard, NewWork

NO_REPORT = GangReport(num_jobs=1)
"""A gang that has not reported yet counts as busy."""


@dataclass(slots=True, kw_only=True)
class LessLoaded:
    """Ray Serve's router: the one of two random gangs that has fewer requests."""

    _random: Random = field(default_factory=lambda: Random(1))

    def choose(self, now_s: float, running: Sequence[SimulatedReplica], job: PictureJob) -> SimulatedReplica:
        """See ``Strategy.choose``."""
        two = self._random.sample(running, min(2, len(running)))
        return min(two, key=lambda gang: len(gang.jobs))


@dataclass(slots=True)
class ByWork(LessLoaded):
    """Troupe's own: ``GangScaler`` for gangs, ``LoadBoard`` for requests."""

    rules: ScalingRules
    every_s: float = REPORT_EVERY_S
    """Interval of decisions, and of the reports that precede them."""
    decisions_ms: list[float] = field(default_factory=list)
    """CPU time of each decision."""
    choices_ms: list[float] = field(default_factory=list)
    """CPU time of each choice of a gang."""
    _scaler: GangScaler | None = None
    _reports: dict[str, GangReport] = field(default_factory=dict)
    _board: LoadBoard = field(default_factory=LoadBoard)
    _stats: dict[str, dict[str, Any]] = field(default_factory=dict)

    def target(self, now_s: float, cluster: Cluster) -> int:
        """See ``Strategy.target``. The policy sees the gangs' reports of the last decision, as in Ray Serve.

        Serve starts the first gang itself and asks again when it runs. It ends none while a request is open.
        """
        self._scaler = self._scaler or GangScaler(self.rules)
        before, self._reports = self._reports, {gang.name: gang.report() for gang in cluster.running}
        self._report(now_s, cluster.running)
        if not cluster.running and cluster.num_open:
            return max(1, cluster.target)
        gangs = {name: before.get(name, NO_REPORT) for name in self._reports}
        seen = Observation(now_s=now_s, target=cluster.target, gangs=gangs)
        begin_s = time.thread_time()
        target = self._scaler.decide(seen)
        self.decisions_ms.append(1e3 * (time.thread_time() - begin_s))
        return target or min(1, cluster.num_open)

    def choose(self, now_s: float, running: Sequence[SimulatedReplica], job: PictureJob) -> SimulatedReplica:
        """See ``Strategy.choose``."""
        by_name = {gang.name: gang for gang in running}
        begin_s = time.thread_time()
        ranked = self._board.choose([*by_name], str(job.number), NewWork(job.size, job.num_steps), now_s)
        self.choices_ms.append(1e3 * (time.thread_time() - begin_s))
        return by_name[ranked[0]] if ranked else LessLoaded.choose(self, now_s, running, job)

    def _report(self, now_s: float, running: Sequence[SimulatedReplica]) -> None:
        """Report gangs to the router: new ones at once, others in turn (``REPLICAS_PER_REPORT_S``)."""
        num_turns = -(-self.rules.max_gangs // REPLICAS_PER_REPORT_S)
        turn = round(now_s / self.every_s) % num_turns
        self._stats = {
            gang.name: gang.load().to_stats()
            if gang.name not in self._stats or gang.number % num_turns == turn
            else self._stats[gang.name]
            for gang in running
        }
        self._board.hear(self._stats, now_s)


@dataclass(slots=True)
class ByRequests(LessLoaded):
    """Ray Serve 2.60's default: open requests per replica."""

    min_gangs: int
    max_gangs: int
    target_ongoing_requests: float = 2.0
    look_back_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    every_s: float = 2.0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)
    _wish: int = 0
    _since_s: float = 0.0

    def target(self, now_s: float, cluster: Cluster) -> int:
        """See ``Strategy.target``."""
        self._samples.append((now_s, cluster.num_open))
        while now_s - self._samples[0][0] > self.look_back_s:
            self._samples.popleft()
        mean = sum(num for _, num in self._samples) / len(self._samples)
        if not cluster.running:
            return max(1, cluster.target) if mean else cluster.target
        desired = math.ceil(mean / self.target_ongoing_requests)
        return self._delayed(now_s, min(self.max_gangs, max(self.min_gangs, desired)), cluster.target)

    def _delayed(self, now_s: float, desired: int, target: int) -> int:
        wish = (desired > target) - (desired < target)
        if wish != self._wish:
            self._wish, self._since_s = wish, now_s
        if not wish or now_s - self._since_s < (self.upscale_delay_s if wish > 0 else self.downscale_delay_s):
            return target
        self._wish = 0
        return desired if wish > 0 or target == 1 else max(1, desired)


@dataclass(slots=True)
class FixedSize(LessLoaded):
    """A fixed number of gangs all day."""

    num_gangs: int
    every_s: float = 60.0

    def target(self, now_s: float, cluster: Cluster) -> int:
        """See ``Strategy.target``."""
        return self.num_gangs


@dataclass(slots=True)
class Observed:
    """Another strategy, and the state of its cluster before each decision."""

    strategy: Strategy
    moments: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, number of running gangs and number of running nodes."""

    @property
    def every_s(self) -> float:
        """See ``Strategy.every_s``."""
        return self.strategy.every_s

    def target(self, now_s: float, cluster: Cluster) -> int:
        """See ``Strategy.target``."""
        num_nodes = sum(node.ready_s <= now_s for node in cluster.nodes)
        self.moments.append((now_s, len(cluster.running), num_nodes))
        return self.strategy.target(now_s, cluster)

    def choose(self, now_s: float, running: Sequence[SimulatedReplica], job: PictureJob) -> SimulatedReplica:
        """See ``Strategy.choose``."""
        return self.strategy.choose(now_s, running, job)
