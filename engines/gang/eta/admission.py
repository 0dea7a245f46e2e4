"""When jobs of a gang will be done, and which it does not take because that is too late."""

from __future__ import annotations

from engines.gang.clock import Clock
from engines.gang.errors import DEADLINE, TooLateError
from engines.gang.eta.prediction import StepPrediction
from engines.gang.jobs.job import Job
from engines.gang.jobs.job_table import JobTable, OpenJob
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.jobs.step_plan import Work
from engines.gang.ranks.traffic import Traffic

RENEW_EVERY_S = 0.1
RENEW_PER_JOB_S = 0.01
"""Predictions for running jobs are as old as this at most, and so much older for each job that is open: a rehearsal
of 36 jobs takes milliseconds, of hundreds tens of them."""


class Outlook:
    """By what the scheduler predicts, and what is under way. ``max_wait_s`` is the longest that a job may wait for
    others. Nothing is said, and nobody refused, where a prediction would be a guess."""

    def __init__(
        self, scheduler: Scheduler, table: JobTable, traffic: Traffic, clock: Clock, max_wait_s: float | None
    ) -> None:
        self._scheduler, self._table, self._traffic, self._clock = scheduler, table, traffic, clock
        self._max_wait_s = max_wait_s
        self._times_s: dict[str, float] | None = {}
        self._renewed_s = -RENEW_EVERY_S
        self._renewed_by: StepPrediction | None = None

    def admit(self, job: Job) -> float | None:
        """Returns in how many seconds ``job`` will be done; None if nobody knows. Refuses (``TooLateError``) what would
        be done after its deadline, or would wait for too long; ``ValueError`` for a deadline that could never be met.
        """
        knows_it = self._scheduler.prediction.knows(job)
        lone_s = self._scheduler.lone_s(job) if knows_it else 0.0
        _check_alone(job, lone_s)
        self._check_deadline(job, lone_s)
        if not (knows_it and self._knows_all()):
            return None
        beside, now_s = [*self._table.coming, job], self._clock.now_s()
        ends_s = self._scheduler.ends_s(now_s, beside=beside)
        predicted_s = next(end_s for job_id, end_s in ends_s if job_id == job.job_id) + self._under_way_s()
        self._check_deadline(job, predicted_s)
        if self._max_wait_s is not None and not job.accepted:
            late_s = predicted_s - lone_s - self._max_wait_s
            self._check(predicted_s, "the longest wait, max_wait_s,", self._max_wait_s, late_s)
        return predicted_s

    def eta_s(self, open_job: OpenJob, step: int) -> float | None:
        """Returns in how many seconds an open job will be done, after its ``step``; None if nobody knows. Where its
        shape is new, its own steps tell, if one of them was warm and no other job comes between."""
        num_left, step_s = open_job.job.num_forwards_after(step), open_job.warm_step_s
        own_s = 0.0 if not num_left else None if step_s is None else num_left * step_s
        now_s = self._clock.now_s()
        every_s = RENEW_EVERY_S + RENEW_PER_JOB_S * self._table.num_open
        if now_s - self._renewed_s >= every_s or self._renewed_by is not self._scheduler.prediction:
            self._renew(now_s)
        if self._times_s is None:
            return own_s if not num_left or self._table.num_open == 1 else None
        known_s = self._times_s.get(open_job.job.job_id)  # not there if its last step is under way
        return own_s if known_s is None else max(0.0, known_s - (now_s - self._renewed_s))

    def measured_s(self, work: Work) -> float:
        """Returns what ``work`` will take, by steps that were measured; 0 where one of them was not."""
        return self._scheduler.prediction.measured_s(self._busy(work), work.num_ranks)

    def next_end_s(self) -> float | None:
        """Returns when the first of all jobs will be done; None if there is none, or nobody knows."""
        if not self._knows_all():
            return None
        return next((end_s for _, end_s in self._scheduler.ends_s(self._clock.now_s())), None)

    def _renew(self, now_s: float) -> None:
        self._renewed_s, self._renewed_by, self._times_s = now_s, self._scheduler.prediction, None
        if self._knows_all():
            under_way_s = self._under_way_s()
            times_s = self._scheduler.finish_times_s(now_s, beside=self._table.coming)
            self._times_s = {known: time_s + under_way_s for known, time_s in times_s.items()}

    def _knows_all(self) -> bool:
        """Returns whether no step of an open job is a guess: each may come before any other's."""
        return all(map(self._scheduler.prediction.knows, self._table.open_jobs))

    def _check_deadline(self, job: Job, at_least_s: float) -> None:
        """Refuses what would be late if its steps took ``at_least_s`` from now. Its deadline counts from its arrival to
        the end of its decoding."""
        if job.deadline_s is not None:
            predicted_s = job.waited_s + at_least_s + job.decode_s
            self._check(predicted_s, DEADLINE, job.deadline_s, predicted_s - job.deadline_s)

    def _check(self, predicted_s: float, limit: str, limit_s: float, late_s: float) -> None:
        if late_s > 0:
            self._table.refuse(TooLateError(self._table.num_waiting, late_s, predicted_s, limit, limit_s))

    def _under_way_s(self) -> float:
        """Returns how long the ranks will be at what they were sent."""
        return self._traffic.busy_s(self._clock.now_s(), self._step_s)

    def _step_s(self, work: Work) -> float:
        return sum(self._scheduler.prediction.step_s(job, work.num_ranks) for job in self._busy(work))

    def _busy(self, work: Work) -> list[Job]:
        """Returns the jobs whose step in it makes forwards."""
        steps = [(self._table.get(step.job_id).job, step.step) for step in work.job_steps]
        return [job for job, step in steps if step not in job.idle_steps]


def _check_alone(job: Job, lone_s: float) -> None:
    """``ValueError`` for a deadline that could not be met if no other job were there."""
    alone_s = lone_s + job.decode_s
    if job.deadline_s is not None and alone_s > job.deadline_s:
        what = "the steps and decoding" if job.decode_s else "the steps"
        raise ValueError(
            f"deadline_s is {job.deadline_s:.3g}, and {what} alone take {alone_s:.3g} s: allow more time, or "
            "ask for fewer steps or a smaller size"
        )
