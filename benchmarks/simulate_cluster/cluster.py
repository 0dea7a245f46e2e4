"""Gangs on nodes that start, work, fail and end, by discrete events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from benchmarks.policies.h200 import STEPS
from engines.gang.autoscaling import GangReport
from engines.gang.jobs.job import Job
from engines.gang.load import GangLoad, OpenWork
from engines.gang.policies.policy import Candidate, Policy, make_policy

FAILURE_SEEN_S = 2.0
"""Seconds until the jobs of a failed gang run elsewhere."""
STEP_S = {size: by_size[2] for size, by_size in STEPS.items()}
"""Step times that gangs report. Requests carry their own seconds: only the names count here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """A cluster of equal nodes that cost from their order to their end."""

    num_gpus: int
    gpus_per_node: int = 8
    num_ranks: int = 2
    """GPUs of a gang."""
    node_start_s: float = 240.0
    """From the order of a node until it runs."""
    gang_start_s: float = 28.0
    """From the order of a gang on a node that runs until it takes jobs."""
    node_idle_s: float = 120.0
    """Time without a gang after which a node ends."""
    failures_per_gpu_hour: float = 1 / 50_000
    """Grattafiori et al. 2024, "The Llama 3 Herd of Models": 419 interruptions of 16,384 GPUs in 54 days."""
    min_gangs: int = 1

    @property
    def max_gangs(self) -> int:
        return self.num_gpus // self.num_ranks

    @property
    def gangs_per_node(self) -> int:
        return self.gpus_per_node // self.num_ranks


class Picture(NamedTuple):
    """A request of the trace."""

    at_s: float
    size: str
    lone_s: float
    """Seconds that it takes alone."""


@dataclass(slots=True, eq=False)
class PictureJob:
    """A request on its way."""

    number: int
    size: str
    lone_s: float
    arrived_s: float
    left_s: float

    def candidate(self) -> Candidate:
        """Return it as the gang's policy sees it: steps of one second."""
        return Candidate(
            job=Job(job_id=str(self.number), request=None, conditioning=None, num_steps=1),
            number=self.number,
            num_left=self.left_s,
            step_s={1: 1.0},
            fastest_s=1.0,
            whole_s=self.lone_s,
            holders=() if self.left_s == self.lone_s else (0,),
        )


@dataclass(slots=True, eq=False)
class ClusterNode:
    ready_s: float
    begun_s: float
    gangs: set[SimulatedReplica] = field(default_factory=set)
    empty_s: float = 0.0
    """Since when it has no gang, if it has none."""


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """A gang with its own policy of jobs, one at a time as in a gang that is not elastic."""

    name: str
    number: int
    node: ClusterNode
    policy: Policy
    now_s: float
    jobs: dict[int, PictureJob] = field(default_factory=dict)
    first: PictureJob | None = None
    version: int = 0
    is_running: bool = False
    is_draining: bool = False
    num_arrived: int = 0
    arrived_s: float = 0.0
    arrived_s2: float = 0.0
    _load: GangLoad | None = None

    def take(self, job: PictureJob, now_s: float) -> None:
        """Add a job."""
        self.advance(now_s)
        self.jobs[job.number] = job
        self.num_arrived += 1
        self.arrived_s += job.lone_s
        self.arrived_s2 += job.lone_s**2

    def advance(self, now_s: float) -> None:
        """Work on the first job up to ``now_s``."""
        by_s, self.now_s = now_s - self.now_s, now_s
        if self.first is not None and by_s > 0:
            if len(self.jobs) > 1:
                waiting = [job.candidate() for job in self.jobs.values() if job is not self.first]
                self.policy.note(self.first.candidate(), by_s, waiting)
            self.first.left_s -= by_s
            self._load = None

    def end_first(self, now_s: float) -> PictureJob:
        """Remove the job that was worked on, which is done."""
        self.advance(now_s)
        assert self.first is not None
        self.policy.forget(str(self.first.number))
        return self.jobs.pop(self.first.number)

    def reorder(self) -> None:
        """Let the policy choose the job to work on."""
        self.version += 1
        self._load = None
        if len(self.jobs) < 2:
            self.first = next(iter(self.jobs.values()), None)
            return
        candidates = [job.candidate() for job in self.jobs.values()]
        self.first = self.jobs[self.policy.order(candidates, self.now_s)[0].number]

    def fail(self) -> list[PictureJob]:
        """Forget everything. Return the jobs, which begin anew."""
        jobs, self.jobs, self.first = list(self.jobs.values()), {}, None
        for job in jobs:
            job.left_s = job.lone_s
        self.is_running, self.version, self._load = False, self.version + 1, None
        self.num_arrived, self.arrived_s, self.arrived_s2 = 0, 0.0, 0.0
        return jobs

    def load(self) -> GangLoad:
        """Return what it reports to the router, as of ``now_s``."""
        if self._load is None:
            jobs = {str(job.number): OpenWork(job.left_s, job.left_s) for job in self.jobs.values()}
            self._load = GangLoad(jobs=jobs, step_s=STEP_S)
        return self._load

    def report(self, now_s: float, start_s: float) -> GangReport:
        """Return what it reports to the autoscaling policy."""
        return GangReport(
            backlog_s=max(0.0, self.load().backlog_s - (now_s - self.now_s)) if self.jobs else 0.0,
            num_jobs=len(self.jobs),
            num_arrived=self.num_arrived,
            arrived_s=self.arrived_s,
            arrived_s2=self.arrived_s2,
            start_s=start_s,
        )


class Strategy(Protocol):
    """Decisions about gangs and requests."""

    every_s: float
    """Interval of decisions."""

    def target(self, now_s: float, cluster: Cluster) -> int:
        """Return the number of gangs that there should be."""
        ...

    def choose(self, now_s: float, running: Sequence[SimulatedReplica], job: PictureJob) -> SimulatedReplica:
        """Return the gang for a request."""
        ...


class Cluster:
    """One run of one strategy. ``waits_s`` has each request's time beyond what it takes alone.

    ``policy`` is the order of jobs in a gang.
    """

    def __init__(self, spec: ClusterSpec, strategy: Strategy, seed: int = 1, policy: str = "shortest") -> None:
        self.spec, self._strategy, self._policy = spec, strategy, policy
        self._random = Random(seed)
        self.nodes: list[ClusterNode] = []
        self.gangs: list[SimulatedReplica] = []
        """Gangs that start or run, the oldest first."""
        self.unassigned: list[PictureJob] = []
        self.num_open = 0
        self.target = 0
        self.waits_s: list[float] = []
        self.num_changes = self.num_failures = 0
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
        """Run all ``arrivals`` to the last picture. ``warm_gangs`` gangs run from the beginning."""
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
        picture = self._picture
        self.num_open += 1
        self._assign(PictureJob(next(self._numbers), picture.size, picture.lone_s, picture.at_s, picture.lone_s))
        self._next_arrival()

    # Jobs.

    def _assign(self, job: PictureJob) -> None:
        if not self.running:
            self.unassigned.append(job)
            return
        gang = self._strategy.choose(self.now_s, self.running, job)
        gang.take(job, self.now_s)
        self._work(gang)

    def _work(self, gang: SimulatedReplica) -> None:
        gang.reorder()
        if gang.first is not None:
            self._at(self.now_s + gang.first.left_s, partial(self._end_job, gang, gang.version))

    def _end_job(self, gang: SimulatedReplica, version: int) -> None:
        if version != gang.version:
            return  # the order has changed since
        job = gang.end_first(self.now_s)
        self.waits_s.append(self.now_s - job.arrived_s - job.lone_s)
        self.num_open -= 1
        self._work(gang)
        if gang.is_draining and not gang.jobs:
            self._remove(gang)

    # Gangs and nodes.

    def _decide(self) -> None:
        target = self._strategy.target(self.now_s, self)
        self.num_changes += target != self.target
        self.target = target
        while len(self.gangs) < target and self._start_gang(self.now_s):
            pass
        for _ in range(len(self.gangs) - target):
            self._stop_gang(self._victim())
        for node in [node for node in self.nodes if not node.gangs]:
            if self.now_s - node.empty_s >= self.spec.node_idle_s:
                self._charge(node)
                self.nodes.remove(node)
        if self._picture is not None or self.num_open:
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
            node = ClusterNode(now_s if is_warm else now_s + spec.node_start_s, now_s)
            self.nodes.append(node)
        number = next(self._numbers)
        gang = SimulatedReplica(f"gang{number}", number, node, make_policy(self._policy), now_s)
        node.gangs.add(gang)
        self.gangs.append(gang)
        self._at(now_s if is_warm else max(now_s, node.ready_s) + spec.gang_start_s, partial(self._ready, gang))
        return True

    def _ready(self, gang: SimulatedReplica) -> None:
        if gang.is_draining:
            return
        gang.is_running, gang.now_s, self._running = True, self.now_s, None
        if rate := self.spec.failures_per_gpu_hour * self.spec.num_ranks / 3600:
            self._at(self.now_s + self._random.expovariate(rate), partial(self._fail, gang))
        waiting, self.unassigned = self.unassigned, []
        for job in waiting:
            self._assign(job)

    def _victim(self) -> SimulatedReplica:
        """Return the gang that Ray Serve ends: one that starts, else the newest on a node with the fewest."""
        starting = [gang for gang in self.gangs if not gang.is_running]
        return starting[-1] if starting else min(self.running, key=lambda one: (len(one.node.gangs), -one.number))

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
        self._at(self.now_s + self.spec.gang_start_s, partial(self._ready, gang))

    def _charge(self, node: ClusterNode) -> None:
        self.gpu_s += (self.now_s - node.begun_s) * self.spec.gpus_per_node
