"""Predicted completion of a gang's jobs, and refusal of jobs that would be too late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engines.core.field_error import FieldError
from engines.gang.arbiter import Demand
from engines.gang.autoscaling import GangReport
from engines.gang.errors import DEADLINE, TooLateError
from engines.gang.eta.prediction import StepPrediction, forwards_left
from engines.gang.gang_config import Clock
from engines.gang.jobs.job import Job
from engines.gang.jobs.job_table import JobTable, OpenJob
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.jobs.step_plan import Work
from engines.gang.ledger import Ledger
from engines.gang.load import OpenWork

LEAST_BACKLOG_S = 0.01
"""Backlog of a gang with open jobs, however short."""
RENEW_EVERY_S = 0.1
RENEW_PER_JOB_S = 0.01
"""Maximum age of predictions for running jobs, and what each open job adds. Simulating 36 jobs takes milliseconds,
hundreds of jobs tens of milliseconds."""

SPARE_MEMORY_S = 120.0
"""Deadlines of jobs that came within this time count for the number of gangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WakeUp:
    """Predicted time until a gang may send steps."""

    total_s: float = 0.0
    """Seconds until the weights are on the devices: the turns of other models, and the swap."""
    swap_s: float = 0.0
    """The part of it that moves the gang's own weights."""


AWAKE = WakeUp()


class JobAdmission:
    """Predicts from the scheduler and the steps in flight. If a prediction would be a guess, no job is refused."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: JobTable,
        ledger: Ledger,
        clock: Clock,
        max_wait_s: float | None,
        wake_up: Callable[[], WakeUp] = lambda: AWAKE,
    ) -> None:
        """Create it. ``max_wait_s``: the longest wait of a job for others. ``wake_up``: how long the gang sleeps."""
        self._scheduler, self._table, self._ledger, self._clock = scheduler, table, ledger, clock
        self._max_wait_s, self._wake_up = max_wait_s, wake_up
        self._times_s: dict[str, float] | None = {}
        self._renewed_s = -RENEW_EVERY_S
        self._renewed_by: StepPrediction | None = None
        self._arrivals = Arrivals()

    def admit(self, job: Job) -> float | None:
        """Return the predicted seconds until ``job`` is done; None if that would be a guess.

        ``TooLateError`` if it would miss its deadline or wait too long; ``FieldError`` for a deadline that it could not
        meet even alone.
        """
        is_predictable = self._scheduler.prediction.knows(job)
        self._arrivals.add(job, self.work_s(job), self._clock.now_s())
        lone_s = self._scheduler.lone_s(job) if is_predictable else 0.0
        _check_alone(job, lone_s)
        self._check_deadline(job, lone_s)
        if not (is_predictable and self._all_predictable()):
            return None
        beside, now_s = [*self._table.unscheduled, job], self._clock.now_s()
        ends_s = self._scheduler.ends_s(now_s, beside=beside)
        awake_s = next(end_s for job_id, end_s in ends_s if job_id == job.job_id) + self._in_flight_s()
        self._check_wait(job, lone_s, awake_s + self._surely_asleep_s())
        return awake_s + self._wake_up().total_s

    def _surely_asleep_s(self) -> float:
        """Return the seconds of the gang's sleep for which a job may be refused.

        Without open jobs only the swap counts. The gang gets a turn only if a job is accepted, and the job's deadline
        may bring that turn forward.
        """
        wake_up = self._wake_up()
        return wake_up.total_s if self._table.num_open else wake_up.swap_s

    def eta_s(self, open_job: OpenJob, step: int) -> float | None:
        """Return the predicted seconds until an open job is done, after its ``step``; None if that would be a guess.

        A job of a new shape is predicted by its own warm steps while no other job is open.
        """
        num_left, step_s = forwards_left(open_job.job, step, open_job.warm_step), open_job.warm_step_s
        own_s = 0.0 if not num_left else None if step_s is None else num_left * step_s
        now_s = self._clock.now_s()
        every_s = RENEW_EVERY_S + RENEW_PER_JOB_S * self._table.num_open
        if now_s - self._renewed_s >= every_s or self._renewed_by is not self._scheduler.prediction:
            self._renew(now_s)
        if self._times_s is None:
            return own_s if not num_left or self._table.num_open == 1 else None
        simulated_s = self._times_s.get(open_job.job.job_id)  # missing if its last step is in flight
        return own_s if simulated_s is None else max(0.0, simulated_s - (now_s - self._renewed_s))

    def measured_s(self, work: Work) -> float:
        """Return the seconds of ``work`` by measured steps; 0 if one of them was not measured."""
        return self._scheduler.prediction.measured_s(self._jobs_with_forwards(work), work.num_ranks)

    def next_end_s(self) -> float | None:
        """Return the seconds until the first job is done; None without jobs, or if that would be a guess."""
        if not self._all_predictable():
            return None
        ends_s = (end_s for _, end_s in self._scheduler.ends_s(self._clock.now_s()))
        first_s = next(ends_s, None)
        return None if first_s is None else first_s + self._wake_up().total_s

    def demand(self) -> Demand:
        """Return all open work, predicted or guessed."""
        now_s, in_flight_s = self._clock.now_s(), self._in_flight_s()
        ends_s = self._scheduler.finish_times_s(now_s, beside=self._table.unscheduled)
        backlog_s = max((*ends_s.values(), 0.0)) + in_flight_s
        running_s = [ends_s[job_id] + in_flight_s for job_id in self._scheduler.begun if job_id in ends_s]
        slacks_s = [due_s - now_s - ends_s[job_id] for job_id, due_s in self._scheduler.due_s if job_id in ends_s]
        return Demand(
            backlog_s=max(backlog_s, LEAST_BACKLOG_S) if self._table.num_open else 0.0,
            ending_s=min(running_s, default=in_flight_s or None),
            slack_s=min(slacks_s, default=None),
        )

    def report(self) -> GangReport:
        """Return the work of the gang, and of all arrivals so far."""
        jobs = self.open_work()
        arrivals = self._arrivals
        return GangReport(
            backlog_s=sum(one.left_s for one in jobs.values()),
            num_jobs=len(jobs),
            num_arrived=arrivals.num,
            arrived_s=arrivals.work_s,
            arrived_s2=arrivals.work_s2,
            spare_s=arrivals.spare_s(self._clock.now_s()),
        )

    def open_work(self) -> dict[str, OpenWork]:
        """Return the open jobs' predicted gang-seconds, by id. Jobs in flight share the time of the sent steps."""
        in_flight, in_flight_s = frozenset(self._ledger.job_ids), self._in_flight_s()
        unscheduled = {job.job_id for job in self._table.unscheduled}
        planned_s, works = self._scheduler.left_s(), {}
        for job in self._table.open_jobs:
            left_s = self._work_s(job) if job.job_id in unscheduled else planned_s.get(job.job_id, 0.0)
            left_s += in_flight_s / len(in_flight) if job.job_id in in_flight else 0.0
            works[job.job_id] = OpenWork(left_s, left_s / job.priority)
        return works

    def work_s(self, job: Job) -> float | None:
        """Return the predicted gang-seconds of a job; None if that would be a guess."""
        return self._scheduler.work_s(job) if self._scheduler.prediction.knows(job) else None

    def _work_s(self, job: Job) -> float:
        work_s = self.work_s(job)
        return self._arrivals.mean_s if work_s is None else work_s

    def _renew(self, now_s: float) -> None:
        self._renewed_s, self._renewed_by, self._times_s = now_s, self._scheduler.prediction, None
        if self._all_predictable():
            in_flight_s = self._in_flight_s() + self._wake_up().total_s
            times_s = self._scheduler.finish_times_s(now_s, beside=self._table.unscheduled)
            self._times_s = {job_id: time_s + in_flight_s for job_id, time_s in times_s.items()}

    def _all_predictable(self) -> bool:
        """Return whether all open jobs are predictable: any of them may delay any other."""
        return all(map(self._scheduler.prediction.knows, self._table.open_jobs))

    def _check_wait(self, job: Job, lone_s: float, predicted_s: float) -> None:
        self._check_deadline(job, predicted_s)
        if self._max_wait_s is not None and not job.accepted:
            late_s = predicted_s - lone_s - self._max_wait_s
            self._check(predicted_s, "the longest wait, max_wait_s,", self._max_wait_s, late_s)

    def _check_deadline(self, job: Job, at_least_s: float) -> None:
        """Refuse a job that would be late if its steps took ``at_least_s``, including decoding and the wait so far."""
        if job.deadline_s is not None:
            predicted_s = job.waited_s + at_least_s + job.decode_s
            self._check(predicted_s, DEADLINE, job.deadline_s, predicted_s - job.deadline_s)

    def _check(self, predicted_s: float, limit: str, limit_s: float, late_s: float) -> None:
        if late_s > 0:
            self._table.refuse(TooLateError(self._table.num_waiting, late_s, predicted_s, limit, limit_s))

    def _in_flight_s(self) -> float:
        return self._ledger.busy_s(self._clock.now_s(), self._step_s)

    def _step_s(self, work: Work) -> float:
        return sum(self._scheduler.prediction.step_s(job, work.num_ranks) for job in self._jobs_with_forwards(work))

    def _jobs_with_forwards(self, work: Work) -> list[Job]:
        """Return the jobs whose step in ``work`` makes forwards, as they are in this step."""
        steps = [(self._table.get(step.job_id).job, step.step) for step in work.job_steps]
        return [job.at(step) for job, step in steps if step not in job.idle_steps]


class Arrivals:
    """Sums over all jobs that came, and the least time to spare of recent ones."""

    def __init__(self) -> None:
        self.num, self.work_s, self.work_s2 = 0, 0.0, 0.0
        self._spare_s: deque[tuple[float, float]] = deque()

    @property
    def mean_s(self) -> float:
        """Mean predicted seconds of a job; 0 before the first known one."""
        return self.work_s / self.num if self.num else 0.0

    def add(self, job: Job, work_s: float | None, now_s: float) -> None:
        """Count a job of ``work_s`` gang-seconds; None, if that would be a guess, counts as the mean."""
        mean_s2 = self.work_s2 / self.num if self.num else 0.0
        self.work_s += self.mean_s if work_s is None else work_s
        self.work_s2 += mean_s2 if work_s is None else work_s**2
        self.num += 1
        if job.left_s is not None and work_s is not None:
            self._spare_s.append((now_s, max(0.0, job.left_s - work_s)))

    def spare_s(self, now_s: float) -> float:
        """Return the least time to spare of the last jobs with a deadline; infinity without any."""
        while self._spare_s and now_s - self._spare_s[0][0] > SPARE_MEMORY_S:
            self._spare_s.popleft()
        return min((spare_s for _, spare_s in self._spare_s), default=math.inf)


def _check_alone(job: Job, lone_s: float) -> None:
    """Raise ``FieldError`` for a deadline that the job could not meet alone."""
    alone_s = lone_s + job.decode_s
    if job.deadline_s is not None and alone_s > job.deadline_s:
        work = "the steps and decoding" if job.decode_s else "the steps"
        raise FieldError(
            f"deadline_s is {job.deadline_s:.3g}, and {work} alone take {alone_s:.3g} s: allow more time, or "
            "ask for fewer steps or a smaller size",
            DEADLINE,
        )
