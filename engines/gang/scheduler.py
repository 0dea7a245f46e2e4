"""Which ranks work on which jobs in the next step. Pure: no Ray, no clock, no results of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from engines.gang.job import Job
from engines.gang.plan import Emit, JobStep, StepPlan, Work

WidthPolicy = Callable[[Job, int, int], int]
"""``(job, num_ranks, num_jobs) -> width`` for a job that leaves its width open; ``num_jobs`` counts it too."""


def full_width(job: Job, num_ranks: int, num_jobs: int) -> int:
    """Every job on all ranks: the shortest time for each job alone."""
    return num_ranks


def allowed_widths(num_ranks: int) -> tuple[int, ...]:
    """Widths whose teams tile the gang: the divisors of ``num_ranks``."""
    return tuple(width for width in range(1, num_ranks + 1) if num_ranks % width == 0)


@dataclass(slots=True)
class _RunningJob:
    job: Job
    ranks: tuple[int, ...]
    turn: int  # taken when it joins and anew whenever it is served: the lowest is next
    num_planned: int = 0

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

    A job keeps the team of ranks (contiguous, aligned to its width) that it began on, since only they hold its state.
    Each plan serves the job that has waited longest and fills the ranks that it leaves free with the next ones, so a
    job waits at most ``max_running_jobs - 1`` plans between two steps. A job that must be alone begins when all before
    it have ended, and the others wait for its end.
    """

    def __init__(self, *, num_ranks: int, max_running_jobs: int, width_policy: WidthPolicy | None = None) -> None:
        self._num_ranks = num_ranks
        self._max_running_jobs = max_running_jobs
        self._width_policy = width_policy or full_width
        self._waiting: deque[Job] = deque()
        self._running: dict[str, _RunningJob] = {}
        self._drops: list[str] = []
        self._sequences = count()
        self._turns = count()

    @property
    def running_ids(self) -> tuple[str, ...]:
        return tuple(self._running)

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
        works = tuple(self._plan_works())
        drops, self._drops = tuple(self._drops), []
        return StepPlan(sequence=next(self._sequences), works=works, drops=drops)

    def _start_waiting(self, is_idle: bool) -> None:
        while self._waiting and self._may_start(self._waiting[0], is_idle):
            job = self._waiting.popleft()
            self._running[job.job_id] = _RunningJob(job, self._choose_team(self._width(job)), next(self._turns))

    def _may_start(self, job: Job, is_idle: bool) -> bool:
        if job.alone:
            return is_idle and not self._running
        is_free = not any(running.job.alone for running in self._running.values())
        return is_free and len(self._running) < self._max_running_jobs

    def _plan_works(self) -> Iterable[Work]:
        busy: set[int] = set()
        for running in sorted(self._running.values(), key=lambda running: running.turn):
            if busy.isdisjoint(running.ranks):
                busy.update(running.ranks)
                yield Work(job_steps=(running.plan_step(next(self._turns)),), ranks=running.ranks)
                if running.num_left == 0:
                    del self._running[running.job.job_id]

    def _width(self, job: Job) -> int:
        num_jobs = len(self._running) + len(self._waiting) + 1
        width = job.width or self._width_policy(job, self._num_ranks, num_jobs)
        assert width in allowed_widths(self._num_ranks), width
        return width

    def _choose_team(self, width: int) -> tuple[int, ...]:
        """The team of this width whose busiest rank has the fewest steps ahead of it; the first of equals."""
        teams = [tuple(range(first, first + width)) for first in range(0, self._num_ranks, width)]
        return min(teams, key=lambda team: max(self._num_steps_ahead(rank) for rank in team))

    def _num_steps_ahead(self, rank: int) -> int:
        return sum(running.num_left for running in self._running.values() if rank in running.ranks)
