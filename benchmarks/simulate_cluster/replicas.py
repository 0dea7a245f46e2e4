"""Gangs of a simulated cluster: with the scheduler of a real one, step by step, or with its policy alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from benchmarks.policies.h200 import NUM_STEPS
from benchmarks.policies.simulation import Arrival, SimulatedGang, Simulation
from engines.gang.autoscaling import GangReport
from engines.gang.jobs.job import Job
from engines.gang.load import GangLoad, OpenWork
from engines.gang.policies.policy import Candidate, Policy, make_policy

ROUNDING_S = 1e-9


class Picture(NamedTuple):
    """A request of the trace."""

    at_s: float
    size: str
    num_steps: int = NUM_STEPS


@dataclass(slots=True, eq=False)
class PictureJob:
    """A request on its way."""

    number: int
    size: str
    num_steps: int
    lone_s: float
    """Seconds of its steps alone."""
    arrived_s: float
    left_s: float = 0.0


@dataclass(slots=True, eq=False)
class ClusterNode:
    ready_s: float
    begun_s: float
    gangs: set[SimulatedReplica] = field(default_factory=set)
    empty_s: float = 0.0
    """Since when it has no gang, if it has none."""


class SimulatedReplica(ABC):
    """A gang that runs on its caller's clock."""

    def __init__(
        self,
        name: str,
        number: int,
        node: ClusterNode,
        step_s: Mapping[str, float],
        now_s: float,
        policy: str = "shortest",
    ) -> None:
        """Create a gang. ``step_s`` has the seconds of a step by size."""
        self.name, self.number, self.node, self.now_s = name, number, node, now_s
        self.jobs: dict[int, PictureJob] = {}
        self.is_running = self.is_draining = False
        self.version = 0
        """Number of the jobs that came, and of failures: each may change ``next_s``."""
        self.start_s = 0.0
        """Seconds of its start on a node that runs."""
        self._step_s = step_s
        self._warm_step_s: dict[str, float] = {}
        """Step times of sizes that it has run."""
        self._sums = (0, 0.0, 0.0)
        self._policy_name = policy
        self._forget()

    def take(self, job: PictureJob) -> None:
        """Add a job now."""
        num, work_s, work_s2 = self._sums
        self._sums = num + 1, work_s + job.lone_s, work_s2 + job.lone_s**2
        self.jobs[job.number] = job
        self.version += 1
        self._add(job)

    def advance(self, now_s: float) -> list[PictureJob]:
        """Work up to ``now_s``, which is ``next_s`` at most. Return the jobs that are done."""
        done = [self.jobs.pop(number) for number in self._work(now_s)]
        self._warm_step_s |= {job.size: self._step_s[job.size] for job in done}
        return done

    def fail(self) -> list[PictureJob]:
        """Forget everything. Return the jobs, which begin anew."""
        jobs, self.jobs = [*self.jobs.values()], {}
        self.is_running, self.version, self._sums = False, self.version + 1, (0, 0.0, 0.0)
        self._forget()
        return jobs

    def load(self) -> GangLoad:
        """Return its report to the router."""
        jobs = {str(number): OpenWork(left_s, left_s) for number, left_s in self._left_s().items()}
        return GangLoad(jobs=jobs, step_s=self._warm_step_s)

    def report(self) -> GangReport:
        """Return its report to the autoscaling policy."""
        num_arrived, arrived_s, arrived_s2 = self._sums
        return GangReport(
            backlog_s=sum(self._left_s().values()),
            num_jobs=len(self.jobs),
            num_arrived=num_arrived,
            arrived_s=arrived_s,
            arrived_s2=arrived_s2,
            start_s=self.start_s,
            node=float(id(self.node)),
        )

    @property
    @abstractmethod
    def next_s(self) -> float | None:
        """Time at which its state changes next without a further job; None: never."""

    @abstractmethod
    def _add(self, job: PictureJob) -> None: ...

    @abstractmethod
    def _work(self, now_s: float) -> list[int]:
        """Work up to ``now_s``. Return the numbers of the jobs that are done."""

    @abstractmethod
    def _left_s(self) -> dict[int, float]:
        """Return the seconds left of each open job, by number."""

    @abstractmethod
    def _forget(self) -> None: ...


class StepReplica(SimulatedReplica):
    """A gang with the scheduler of a real one, which sends steps ahead."""

    @property
    def next_s(self) -> float | None:
        """See ``SimulatedReplica.next_s``."""
        return self._simulation.next_s

    def _add(self, job: PictureJob) -> None:
        arrival = Arrival(at_s=self.now_s, shape=job.size, num_steps=job.num_steps)
        self._simulation.add(arrival, job.number)
        self._simulation.advance(self.now_s)

    def _work(self, now_s: float) -> list[int]:
        self._simulation.advance(now_s)
        self.now_s = now_s
        return self._simulation.pop_done()

    def _left_s(self) -> dict[int, float]:
        return self._simulation.left_s(self.now_s)

    def _forget(self) -> None:
        gang = SimulatedGang(steps={size: {1: step_s} for size, step_s in self._step_s.items()}, num_ranks=1)
        self._simulation = Simulation(gang, make_policy(self._policy_name), keeps_records=False)


class JobReplica(SimulatedReplica):
    """A gang with the policy of a real one, which orders whole jobs. It takes less time to simulate."""

    first: PictureJob | None
    """The current job."""

    @cached_property
    def _policy(self) -> Policy:
        return make_policy(self._policy_name)

    @property
    def next_s(self) -> float | None:
        """See ``SimulatedReplica.next_s``."""
        return None if self.first is None else self.now_s + self.first.left_s

    def _add(self, job: PictureJob) -> None:
        job.left_s = job.lone_s
        self._reorder()

    def advance(self, now_s: float) -> list[PictureJob]:
        """See ``SimulatedReplica.advance``."""
        if done := super().advance(now_s):
            self._reorder()
        return done

    def _work(self, now_s: float) -> list[int]:
        by_s, self.now_s = now_s - self.now_s, now_s
        if self.first is None or by_s <= 0:
            return []
        if len(self.jobs) > 1:
            waiting = [_candidate(job) for job in self.jobs.values() if job is not self.first]
            self._policy.note(_candidate(self.first), by_s, waiting)
        self.first.left_s -= by_s
        if self.first.left_s > ROUNDING_S:
            return []
        self._policy.forget(str(self.first.number))
        return [self.first.number]

    def _reorder(self) -> None:
        """Let the policy choose the job to work on."""
        if len(self.jobs) < 2:
            self.first = next(iter(self.jobs.values()), None)
            return
        candidates = [_candidate(job) for job in self.jobs.values()]
        self.first = self.jobs[self._policy.order(candidates, self.now_s)[0].number]

    def _left_s(self) -> dict[int, float]:
        return {number: job.left_s for number, job in self.jobs.items()}

    def _forget(self) -> None:
        self.first = None


def _candidate(job: PictureJob) -> Candidate:
    """Return a job as the gang's policy sees it: steps of one second."""
    return Candidate(
        job=Job(job_id=str(job.number), request=None, conditioning=None, num_steps=1),
        number=job.number,
        num_left=job.left_s,
        step_s={1: 1.0},
        fastest_s=1.0,
        whole_s=job.lone_s,
        holders=() if job.left_s == job.lone_s else (0,),
    )
