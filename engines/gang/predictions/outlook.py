"""When jobs of a gang will be done, and which it does not take because that is too late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engines.gang.clock import Clock
from engines.gang.errors import TooLateError
from engines.gang.job import Job
from engines.gang.job_table import JobTable
from engines.gang.scheduler import Scheduler
from engines.gang.watchdog import Traffic

RENEW_EVERY_S = 0.1
"""Predictions for running jobs are as old as this at most."""


class Outlook:
    """By what the scheduler predicts, and what is under way. ``max_wait_s`` is the longest that a job may wait for
    others."""

    def __init__(
        self, scheduler: Scheduler, table: JobTable, traffic: Traffic, clock: Clock, max_wait_s: float | None
    ) -> None:
        self._scheduler, self._table, self._traffic, self._clock = scheduler, table, traffic, clock
        self._max_wait_s = max_wait_s
        self._times_s: dict[str, float] = {}
        self._renewed_s = -RENEW_EVERY_S

    def admit(self, job: Job) -> float:
        """Returns in how many seconds ``job`` will be done. Refuses (``TooLateError``) what would be done after its
        deadline, or would wait for too long; ``ValueError`` for a deadline that could never be met.

        Before anything was measured nobody knows, and all are taken.
        """
        beside = [*self._table.coming, job]
        now_s, lone_s = self._clock.now_s(), self._scheduler.lone_s(job)
        predicted_s = self._scheduler.finish_times_s(now_s, beside=beside)[job.job_id] + self._under_way_s()
        if not self._scheduler.prediction.measured:
            return predicted_s
        if job.deadline_s is not None:
            if lone_s > job.deadline_s:
                raise ValueError(
                    f"deadline_s is {job.deadline_s:.3g}, and the steps alone take {lone_s:.3g} s: allow more time, or "
                    "ask for fewer steps or a smaller size"
                )
            self._check(predicted_s, "deadline_s", job.deadline_s, predicted_s - job.deadline_s)
        if self._max_wait_s is not None:
            late_s = predicted_s - lone_s - self._max_wait_s
            self._check(predicted_s, "the longest wait, max_wait_s,", self._max_wait_s, late_s)
        return predicted_s

    def eta_s(self, job_id: str) -> float | None:
        """Returns in how many seconds an open job will be done; None if its last step is under way."""
        now_s = self._clock.now_s()
        if now_s - self._renewed_s >= RENEW_EVERY_S:
            under_way_s, self._renewed_s = self._under_way_s(), now_s
            times_s = self._scheduler.finish_times_s(now_s, beside=self._table.coming)
            self._times_s = {known: time_s + under_way_s for known, time_s in times_s.items()}
        known_s = self._times_s.get(job_id)
        return None if known_s is None else max(0.0, known_s - (now_s - self._renewed_s))

    def next_end_s(self) -> float:
        """Returns when the first of all jobs will be done; 0 if there is none."""
        return min(self._scheduler.finish_times_s(self._clock.now_s()).values(), default=0.0)

    def _check(self, predicted_s: float, limit: str, limit_s: float, late_s: float) -> None:
        if late_s > 0:
            self._table.refuse(TooLateError(self._table.num_waiting, late_s, predicted_s, limit, limit_s))

    def _under_way_s(self) -> float:
        """Returns how long the ranks will be at what they were sent; of the first step of each, half is over."""
        by_rank: Counter[int] = Counter()
        for work in self._traffic.works:
            step_s = self._step_s(work.job_ids, work.num_ranks)
            for rank in work.ranks:
                by_rank[rank] += step_s if by_rank[rank] else step_s / 2  # type: ignore[assignment]
        return max(by_rank.values(), default=0.0)

    def _step_s(self, job_ids: Sequence[str], num_ranks: int) -> float:
        jobs = [self._table.get(job_id).job for job_id in job_ids]
        return sum(self._scheduler.prediction.step_s(job, num_ranks) for job in jobs)
