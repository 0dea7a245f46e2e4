"""What the reports of ranks become: the events of jobs, and what is known of the times of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.gang.clock import Clock
from engines.gang.errors import GangBrokenError
from engines.gang.eta.admission import Outlook
from engines.gang.eta.step_times import StepTimes
from engines.gang.jobs.job import JobDone, PreviewReady, StepDone
from engines.gang.jobs.job_table import JobTable, OpenJob
from engines.gang.jobs.step_plan import JobFailure, JobStep, StepReport, Work
from engines.gang.metrics import GangMetrics
from engines.gang.ranks.traffic import Flight
from engines.gang.timesheet import Timesheet


class Publisher:
    """Tells the jobs of ``table`` how they get on, and ``step_times`` how long steps follow each other; what they
    took goes to ``timesheet``. ``same_bytes``: what it says of all jobs (see ``JobDone``)."""

    def __init__(
        self,
        table: JobTable,
        metrics: GangMetrics,
        timesheet: Timesheet,
        step_times: StepTimes,
        outlook: Outlook,
        clock: Clock,
        *,
        same_bytes: bool,
    ) -> None:
        self._table, self._metrics, self._timesheet = table, metrics, timesheet
        self._step_times, self._outlook = step_times, outlook
        self._clock, self._same_bytes = clock, same_bytes
        self._last: dict[int, tuple[Work, float]] = {}
        """What each rank did last, and when it ended."""

    def publish(self, flight: Flight, reports: Mapping[int, StepReport], started_s: float) -> list[OpenJob]:
        """Publishes what became of a flight, by the reports of its ranks; returns the jobs that failed."""
        teams = [(work, [reports[rank] for rank in work.ranks]) for work in flight.works]
        for work, of_team in teams:
            self._timesheet.enter(work, of_team, [self._table.get(job_id) for job_id in work.job_ids])
        self._timesheet.hear(reports.values())
        return [failed for work, of_team in teams for failed in self._publish(work, of_team, flight, started_s)]

    def _publish(self, work: Work, reports: Sequence[StepReport], flight: Flight, started_s: float) -> list[OpenJob]:
        self._note_time(work, reports)
        failed = []
        for job_step in work.job_steps:
            open_job = self._table.get(job_step.job_id)
            if job_step.step == 1:
                open_job.started_s = started_s
            open_job.was_warm = open_job.was_warm and all(report.was_warm for report in reports)
            failure = agreed_failure(job_step.job_id, reports)
            if open_job.outcome is None and failure is not None:
                self._table.fail(open_job, failure.error)
                failed.append(open_job)
            else:
                if job_step.emit == "final":
                    self._timesheet.close(open_job)
                self._publish_step(open_job, job_step, work.num_ranks, flight)
        return failed

    def _note_time(self, work: Work, reports: Sequence[StepReport]) -> None:
        """From the end of a job's step to that of its next one is what a step takes, with all that belongs to it.

        A GPU reports of a step when the one before it has ended, but of one whose latents it hands out when that has:
        what lies between such a report and its neighbours is two steps, or none.
        """
        now_s = self._clock.now_s()
        lasts = [self._last.get(rank) for rank in work.ranks]
        for rank in work.ranks:
            self._last[rank] = (work, now_s)
        last = lasts[0]
        is_steady = last is not None and all(other is not None and _is_next(other[0], work) for other in lasts)
        if last is None or not is_steady or len(work.job_steps) > 1:
            return
        if not all(report.was_warm and report.predicted for report in reports):  # a job that failed makes no forwards
            return
        if work.emits or last[0].emits:
            return
        job = self._table.get(work.job_ids[0]).job
        if not job.idle_steps:  # a GPU runs a step behind its reports: none of these tells which kind its time was
            self._step_times.note(job, work.num_ranks, now_s - last[1])

    def _publish_step(self, open_job: OpenJob, done: JobStep, num_ranks: int, flight: Flight) -> None:
        job_id, num_steps = done.job_id, open_job.job.num_steps
        open_job.num_steps_done = done.step
        step_ms = None if open_job.step_s is None else 1e3 * open_job.step_s
        eta_s = self._outlook.eta_s(open_job, done.step)
        self._table.publish(
            job_id,
            StepDone(
                job_id=job_id,
                step=done.step,
                num_steps=num_steps,
                step_ms=step_ms,
                num_ranks=num_ranks,
                eta_s=eta_s,
                gpu_s=open_job.gpu_s,
            ),
        )
        if done.emit == "preview":
            self._table.publish(job_id, PreviewReady(job_id=job_id, step=done.step, latents=flight.latents[job_id]))
        if done.emit == "final":
            if open_job.outcome is None and not open_job.was_warm:
                self._metrics.job_was_cold()
            self._table.publish(
                job_id,
                JobDone(
                    job_id=job_id,
                    latents=flight.latents[job_id],
                    queue_s=open_job.started_s - open_job.submitted_s,
                    denoise_s=self._clock.now_s() - open_job.started_s,
                    was_warm=open_job.was_warm,
                    gpu_s=open_job.gpu_s,
                    same_bytes=self._same_bytes,
                ),
            )


def _is_next(last: Work, work: Work) -> bool:
    """Whether the same ranks took the same job a step further."""
    step, before = work.job_steps[0], last.job_steps[0]
    return last.ranks == work.ranks and (before.job_id, before.step + 1) == (step.job_id, step.step)


def agreed_failure(job_id: str, reports: Sequence[StepReport]) -> JobFailure | None:
    """How a job failed, if it did. Ranks that disagree on that no longer hold the same state: ``GangBrokenError``."""
    failures = [failure for report in reports for failure in report.failures if failure.job_id == job_id]
    shared = [failure for failure in failures if failure.shared]
    if shared and (len(shared) < len(reports) or len({type(failure.error) for failure in shared}) > 1):
        told = "; ".join(f"{type(failure.error).__name__}: {failure.error}" for failure in shared)
        raise GangBrokenError(f"{len(shared)} of {len(reports)} ranks failed job {job_id}: {told}")
    return failures[0] if failures else None
