"""Gangs on nodes that start, work, fail and end, by discrete events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle
from random import Random
from typing import Protocol

from benchmarks.policies.h200 import STEPS
from benchmarks.simulate_cluster.replicas import (
    ClusterNode,
    JobReplica,
    Picture,
    PictureJob,
    SimulatedReplica,
    StepReplica,
)

FAILURE_SEEN_S = 2.0
"""Seconds until the jobs of a failed gang run elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """A cluster of equal nodes that cost from their order to their end."""

    num_gpus: int
    gpus_per_node: int = 8
    num_ranks: int = 2
    """GPUs of a gang."""
    node_starts_s: Sequence[float] = (240.0,)
    """From the order of a node until it runs, of one after the other, over and over."""
    gang_starts_s: Sequence[float] = (28.0,)
    """The same of gangs on nodes that run, until they take jobs."""
    node_idle_s: float = 120.0
    """Time without a gang after which a node ends."""
    failures_per_gpu_hour: float = 1 / 50_000
    """Grattafiori et al. 2024, "The Llama 3 Herd of Models": 419 interruptions of 16,384 GPUs in 54 days."""
    min_gangs: int = 1
    measured_step_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by size; empty: those of FLUX.1-dev on H200s."""

    @property
    def step_s(self) -> Mapping[str, float]:
        return self.measured_step_s or {size: by_size[self.num_ranks] for size, by_size in STEPS.items()}

    @property
    def max_gangs(self) -> int:
        return self.num_gpus // self.num_ranks

    @property
    def gangs_per_node(self) -> int:
        return self.gpus_per_node // self.num_ranks


class Strategy(Protocol):
    """Decisions about gangs and requests."""

    @property
    def every_s(self) -> float:
        """Interval of decisions."""
        ...

    def target(self, now_s: float, cluster: Cluster) -> int:
        """Return the number of gangs that there should be."""
        ...

    def choose(self, now_s: float, running: Sequence[SimulatedReplica], job: PictureJob) -> SimulatedReplica:
        """Return the gang for a request."""
        ...


class Cluster:
    """One run of one strategy. ``waits_s`` has each request's time beyond what it takes alone.

    ``policy`` is the order of jobs in a gang. ``by_steps``: gangs have the scheduler of a real one.
    """

    def __init__(
        self, spec: ClusterSpec, strategy: Strategy, seed: int = 1, policy: str = "shortest", *, by_steps: bool = True
    ) -> None:
        self.spec, self._strategy, self._policy = spec, strategy, policy
        self._replica = StepReplica if by_steps else JobReplica
        self._step_s = spec.step_s
        self._starts_s, self._node_starts_s = cycle(spec.gang_starts_s), cycle(spec.node_starts_s)
        self._random = Random(seed)
        self.nodes: list[ClusterNode] = []
        self.gangs: list[SimulatedReplica] = []
        """Gangs that start or run, the oldest first."""
        self.unassigned: list[PictureJob] = []
        self.num_open = 0
        self.target = 0
        self.waits_s: list[float] = []
        self.latencies_s: list[float] = []
        self.num_changes = self.num_failures = self.num_starts = 0
        self.gpu_s = self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties, self._numbers = count(), count()
        self._running: list[SimulatedReplica] | None = None
        self._stream: Iterator[Picture] = iter(())
        self._picture: Picture | None = None
        """The next one of the stream."""

    @property
    def running(self) -> list[SimulatedReplica]:
        """Gangs that take requests, the oldest first."""
        if self._running is None:
            self._running = [gang for gang in self.gangs if gang.is_running]
        return self._running

    def run(self, arrivals: Iterable[Picture], warm_gangs: int) -> None:
        """Run all ``arrivals`` to the last picture, and to the end of the last node if no gang has to stay.

        ``warm_gangs`` gangs run from the beginning.
        """
        for _ in range(warm_gangs):
            self._start_gang(0.0, is_warm=True)
        self.target, self._stream = warm_gangs, iter(arrivals)
        self._next_arrival()
        self._at(0.0, self._decide)
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        for node in self.nodes:
            self._charge(node)

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._ties), happen))

    def _next_arrival(self) -> None:
        self._picture = next(self._stream, None)
        if self._picture is not None:
            self._at(self._picture.at_s, self._arrive)

    def _arrive(self) -> None:
        assert self._picture is not None
        at_s, size, num_steps = self._picture
        self.num_open += 1
        lone_s = num_steps * self._step_s[size]
        self._assign(PictureJob(next(self._numbers), size, num_steps, lone_s, at_s))
        self._next_arrival()

    # Jobs.

    def _assign(self, job: PictureJob) -> None:
        if not self.running:
            self.unassigned.append(job)
            return
        gang = self._strategy.choose(self.now_s, self.running, job)
        self._advance(gang)
        gang.take(job)
        self._await(gang)

    def _await(self, gang: SimulatedReplica) -> None:
        """Look at a gang again when its state changes."""
        if gang.next_s is not None:
            self._at(gang.next_s, partial(self._look, gang, gang.version))

    def _look(self, gang: SimulatedReplica, version: int) -> None:
        if version == gang.version:  # else a later look is due
            self._advance(gang)
            self._await(gang)

    def _advance(self, gang: SimulatedReplica) -> None:
        for job in gang.advance(self.now_s):
            self.latencies_s.append(self.now_s - job.arrived_s)
            self.waits_s.append(self.latencies_s[-1] - job.lone_s)
            self.num_open -= 1
        if gang.is_draining and not gang.jobs:
            self._remove(gang)

    # Gangs and nodes.

    def _decide(self) -> None:
        for gang in self.running:
            self._advance(gang)
        target = self._strategy.target(self.now_s, self)
        self.num_changes += target != self.target
        self.target = target
        while len(self.gangs) < target and self._start_gang(self.now_s):
            pass
        for _ in range(len(self.gangs) - target):
            self._stop_gang(self.next_to_end())
        for node in [node for node in self.nodes if not node.gangs]:
            if self.now_s - node.empty_s >= self.spec.node_idle_s:
                self._charge(node)
                self.nodes.remove(node)
        may_be_empty = not self.spec.min_gangs and self.nodes
        if self._picture is not None or self.num_open or may_be_empty:
            self._at(self.now_s + self._strategy.every_s, self._decide)
        else:
            self._events.clear()

    def _start_gang(self, now_s: float, *, is_warm: bool = False) -> bool:
        """Start a gang on the fullest node with room, or on a new one. Return False if the cluster has no room."""
        spec = self.spec
        free = [node for node in self.nodes if len(node.gangs) < spec.gangs_per_node]
        if not free and len(self.nodes) >= -(-spec.num_gpus // spec.gpus_per_node):
            return False  # a gang that ends still has the place
        if free:
            node = max(free, key=lambda one: (len(one.gangs), -one.ready_s))
        else:
            node = ClusterNode(now_s if is_warm else now_s + next(self._node_starts_s), now_s)
            self.nodes.append(node)
        number = next(self._numbers)
        gang = self._replica(f"gang{number}", number, node, self._step_s, now_s, self._policy)
        gang.start_s = next(self._starts_s)
        node.gangs.add(gang)
        self.gangs.append(gang)
        self._at(now_s if is_warm else max(now_s, node.ready_s) + gang.start_s, partial(self._ready, gang))
        return True

    def _ready(self, gang: SimulatedReplica) -> None:
        if gang.is_draining:
            return
        gang.is_running, self._running = True, None
        self.num_starts += 1
        if rate := self.spec.failures_per_gpu_hour * self.spec.num_ranks / 3600:
            self._at(self.now_s + self._random.expovariate(rate), partial(self._fail, gang))
        waiting, self.unassigned = self.unassigned, []
        for job in waiting:
            self._assign(job)

    def next_to_end(self) -> SimulatedReplica:
        """Return the gang that Ray Serve ends: one that starts, else the newest of the oldest node with the fewest."""
        if starting := [gang for gang in self.gangs if not gang.is_running]:
            return starting[-1]
        node = min((gang.node for gang in self.running), key=lambda one: len(one.gangs))
        return [gang for gang in self.running if gang.node is node][-1]

    def _stop_gang(self, gang: SimulatedReplica) -> None:
        """End a gang once it has no jobs. It gets no more."""
        self.gangs.remove(gang)
        gang.is_running, gang.is_draining, self._running = False, True, None
        if not gang.jobs:
            self._remove(gang)

    def _remove(self, gang: SimulatedReplica) -> None:
        gang.node.gangs.discard(gang)
        if not gang.node.gangs:
            gang.node.empty_s = self.now_s

    def _fail(self, gang: SimulatedReplica) -> None:
        """Rebuild a gang on its node. Its jobs run again from the start."""
        if not gang.is_running:
            return
        self.num_failures += 1
        self._running = None
        for job in gang.fail():
            self._at(self.now_s + FAILURE_SEEN_S, partial(self._assign, job))
        self._at(self.now_s + gang.start_s, partial(self._ready, gang))

    def _charge(self, node: ClusterNode) -> None:
        self.gpu_s += (self.now_s - node.begun_s) * self.spec.gpus_per_node
