"""Which ranks work on which jobs in the next step. Pure: no Ray, no clock, no results of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from engines.core.spec import tiling_sizes
from engines.gang.assignment import share_out
from engines.gang.job import Job
from engines.gang.step_plan import Emit, JobStep, Move, StepPlan, Work


@dataclass(slots=True)
class _RunningJob:
    job: Job
    ranks: tuple[int, ...]
    turn: int  # taken when it joins and anew whenever it is served: the lowest is next
    num_planned: int = 0
    holders: tuple[int, ...] = ()  # the ranks with its newest state, once it has begun

    def plan_step(self, next_turn: int) -> JobStep:
        self.turn = next_turn
        self.num_planned += 1
        return JobStep(job_id=self.job.job_id, step=self.num_planned, emit=self._emit())

    def _emit(self) -> Emit | None:
        if self.num_planned == self.job.num_steps:
            return "final"
        return "preview" if self.num_planned in self.job.preview_steps else None

    @property
    def num_left(self) -> int:
        return self.job.num_steps - self.num_planned


class Scheduler:
    """Round robin at step granularity over at most ``max_running_jobs`` jobs.

    Jobs take turns on all ranks. If the gang is ``elastic``, they are given teams anew whenever one begins or ends, the
    smaller the more jobs run, of ``team_sizes`` (by default all that tile the gang). A job's state goes before it to
    ranks that do not hold it.

    Each plan serves the job that has waited longest and fills the ranks that it leaves free with the next ones, so a
    job waits at most ``max_running_jobs - 1`` plans between two steps. Up to ``max_batch`` jobs of one shape on one
    team are served together. An exclusive job begins when all before it have ended, and the others wait for
    its end.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        max_running_jobs: int,
        team_sizes: tuple[int, ...] | None = None,
        elastic: bool = False,
        max_batch: int = 1,
    ) -> None:
        self._all_ranks = tuple(range(num_ranks))
        self._max_running_jobs = max_running_jobs
        self._team_sizes = team_sizes or tiling_sizes(num_ranks)
        self._elastic = elastic
        self._max_batch = max_batch
        self._waiting: deque[Job] = deque()
        self._running: dict[str, _RunningJob] = {}
        self._shared_among: tuple[str, ...] = ()
        self._drops: list[str] = []
        self._sequences = count()
        self._turns = count()

    @property
    def num_steps_left(self) -> dict[str, int]:
        """Steps not yet planned, per running job."""
        return {job_id: running.num_left for job_id, running in self._running.items()}

    def add(self, job: Job) -> None:
        """Take a job that the ranks know of."""
        assert job.job_id not in self._running
        self._waiting.append(job)

    def drop(self, job_id: str) -> None:
        """Plan no more steps of a job that the ranks know of, and have them forget it."""
        self._running.pop(job_id, None)
        self._waiting = deque(job for job in self._waiting if job.job_id != job_id)
        self._drops.append(job_id)

    def next_plan(self, *, is_idle: bool = True) -> StepPlan | None:
        """The next step of the gang, or None when there is nothing to do. ``is_idle``: no earlier plan is under way."""
        self._start_waiting(is_idle)
        if not (self._running or self._drops):
            return None
        if self._elastic:
            self._share_out()
        served = list(self._choose_served())
        moves = tuple(move for jobs in served for running in jobs if (move := _move_of(running)))
        works = tuple(self._plan_work(jobs) for jobs in served)
        drops, self._drops = tuple(self._drops), []
        return StepPlan(sequence=next(self._sequences), works=works, drops=drops, moves=moves)

    def _start_waiting(self, is_idle: bool) -> None:
        while self._waiting and self._may_start(self._waiting[0], is_idle):
            job = self._waiting.popleft()
            self._running[job.job_id] = _RunningJob(job, self._all_ranks, next(self._turns))

    def _may_start(self, job: Job, is_idle: bool) -> bool:
        if job.exclusive:
            return is_idle and not self._running
        is_free = not any(running.job.exclusive for running in self._running.values())
        return is_free and len(self._running) < self._max_running_jobs

    def _share_out(self) -> None:
        """New teams, if other jobs run than those that the gang was shared among last."""
        if tuple(self._running) != self._shared_among:
            self._shared_among = tuple(self._running)
            homes = {job_id: min(running.holders, default=None) for job_id, running in self._running.items()}
            for job_id, ranks in share_out(self._all_ranks, homes, self._team_sizes).items():
                self._running[job_id].ranks = ranks

    def _choose_served(self) -> Iterator[list[_RunningJob]]:
        """The jobs of each work: whose turn it is, and those of its shape that can come along."""
        busy: set[int] = set()
        in_turn = sorted(self._running.values(), key=lambda running: running.turn)
        for running in in_turn:
            if busy.isdisjoint(running.ranks):
                busy.update(running.ranks)
                alike = [other for other in in_turn if _go_together(running, other)]
                yield [running, *alike][: self._max_batch]

    def _plan_work(self, jobs: list[_RunningJob]) -> Work:
        ranks = jobs[0].ranks
        steps = tuple(running.plan_step(next(self._turns)) for running in jobs)
        for running in jobs:
            running.holders = ranks
            if running.num_left == 0:
                del self._running[running.job.job_id]
        return Work(job_steps=steps, ranks=ranks)


def _go_together(running: _RunningJob, other: _RunningJob) -> bool:
    alike = running.job.shape is not None and running.job.shape == other.job.shape
    return alike and other is not running and other.ranks == running.ranks


def _move_of(running: _RunningJob) -> Move | None:
    """What brings the state of a job to ranks of its team that do not hold it; None if all do, or none needs to."""
    missing = tuple(rank for rank in running.ranks if rank not in running.holders)
    if not running.holders or not missing:
        return None
    source = next((rank for rank in running.ranks if rank in running.holders), running.holders[0])
    return Move(job_id=running.job.job_id, source=source, ranks=missing)
