"""The scheduler task of a gang, which alone calls the ranks, and the task that collects what they answer."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from engines.gang.clock import Clock
from engines.gang.config import GangConfig
from engines.gang.errors import GangBrokenError
from engines.gang.job import Job, JobDone, PreviewReady, StepDone
from engines.gang.job_table import JobTable, OpenJob
from engines.gang.metrics import GangMetrics
from engines.gang.rank import kill_ranks
from engines.gang.scheduler import Scheduler
from engines.gang.step_plan import JobFailure, JobStep, StepPlan, StepReport, Work
from engines.gang.watchdog import Flight, Watchdog, answer_of

logger = logging.getLogger(__name__)


class Driver:
    """Sends plans at most ``plans_ahead`` ahead of the reports, and turns reports into the jobs' events.

    Requests only put jobs in and take events out. Serve cancels a request's child tasks recursively, so a rank call
    made in a request's context could vanish on some ranks and hang the others: hence the tasks' fresh contexts.
    """

    def __init__(
        self, config: GangConfig, ranks: Sequence[Any], team_sizes: tuple[int, ...], model: str, clock: Clock
    ) -> None:
        self._config, self._model = config, model
        self._clock = clock
        self._ranks = ranks
        self._metrics = GangMetrics(model)
        self._table = JobTable(config, self._metrics, clock)
        self._watchdog = Watchdog(config, ranks, clock)
        self._scheduler = Scheduler(
            num_ranks=config.num_ranks,
            max_running_jobs=config.max_running_jobs,
            team_sizes=team_sizes,
            elastic=config.elastic,
            max_batch=config.max_batch,
        )
        self._submitted: deque[OpenJob] = deque()
        self._flights: deque[Flight] = deque()
        self._wake_schedule = asyncio.Event()
        self._wake_collect = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._mean_step_s = 0.0
        self.broken: GangBrokenError | None = None

    # What the gang calls, from requests and health checks.

    def start(self) -> None:
        for coroutine in (self._schedule(), self._collect(), self._watchdog.watch()):
            self._spawn(coroutine)
        self._metrics.takes_jobs()

    @property
    def is_cold(self) -> bool:
        return self._watchdog.is_cold

    def open(self, job: Job) -> OpenJob:
        if self.broken is not None:
            raise GangBrokenError(self.broken.reason, self.broken.cause)
        open_job = self._table.open(job, self._retry_after_s())
        self._submitted.append(open_job)
        self._wake_schedule.set()
        return open_job

    def close(self, open_job: OpenJob) -> None:
        """The request no longer listens; a job that has not ended is cancelled."""
        if open_job.outcome is None:
            fields = open_job.job.log_fields | {"num_steps_done": open_job.num_steps_done}
            logger.info("job is cancelled", extra=fields)
            self._table.end(open_job, "cancelled")
            self._drop(open_job)

    def stop(self, error: GangBrokenError) -> None:
        """End all tasks and fail all jobs."""
        if self.broken is None:
            self.broken = error
            self._metrics.takes_none()
            in_flight = [job_id for flight in self._flights for work in flight.plan.works for job_id in work.job_ids]
            self._table.fail_all(error, in_flight)
            self._watchdog.close()
            for task in self._tasks:
                task.cancel()

    def break_gang(self, error: GangBrokenError) -> None:
        if self.broken is None:
            logger.error("gang is broken: %s", error.reason, extra={"model": self._model})
            self._metrics.gang_broke(error.cause)
            self.stop(error)
            kill_ranks(self._ranks)

    # The scheduler task.

    async def _schedule(self) -> None:
        while True:
            self._admit_submitted()
            has_room = len(self._flights) < self._config.plans_ahead
            plan = self._scheduler.next_plan(is_idle=not self._flights) if has_room else None
            if plan is None:
                await self._wake_schedule.wait()
                self._wake_schedule.clear()
            else:
                self._send(plan)

    def _admit_submitted(self) -> None:
        while self._submitted:
            open_job = self._submitted.popleft()
            if open_job.outcome is None:
                refs = [rank.admit.remote(open_job.job) for rank in self._ranks]
                self._spawn(self._finish_admission(open_job, refs))
            else:
                self._table.forget([open_job.job.job_id])

    def _send(self, plan: StepPlan) -> None:
        reports, latents = [], {}
        for index, rank in enumerate(self._ranks):
            emits = plan.emits_of(index)
            returned = rank.execute.options(num_returns=1 + len(emits)).remote(plan)
            report, *emitted = returned if emits else [returned]
            reports.append(report)
            latents.update({emit.job_id: ref for emit, ref in zip(emits, emitted, strict=True)})
        self._flights.append(Flight(plan=plan, reports=tuple(reports), latents=latents))
        self._wake_collect.set()

    # The tasks that wait for ranks.

    async def _finish_admission(self, open_job: OpenJob, refs: Sequence[Any]) -> None:
        answers: list[JobFailure | None] = await asyncio.gather(*(answer_of(i, ref) for i, ref in enumerate(refs)))
        failure = next((answer for answer in answers if answer is not None), None)
        open_job.is_scheduled = True
        if failure is not None:
            self._table.fail(open_job, failure.error)
        if open_job.outcome is None:
            self._scheduler.add(open_job.job)
        else:
            self._drop(open_job)
        self._wake_schedule.set()

    async def _collect(self) -> None:
        while True:
            while not self._flights:
                self._wake_collect.clear()
                await self._wake_collect.wait()
            started_s = self._clock.now_s()
            reports = await self._watchdog.reports(self._flights[0], self._table.jobs)
            flight = self._flights.popleft()
            self._wake_schedule.set()
            for work in flight.plan.works:
                self._publish_work(work, [reports[rank] for rank in work.ranks], flight, started_s)
            self._table.forget(flight.plan.drops)

    # What reports become.

    def _publish_work(self, work: Work, reports: list[StepReport], flight: Flight, started_s: float) -> None:
        step_ms = max(report.step_ms for report in reports)
        self._mean_step_s = 0.9 * self._mean_step_s + 0.1 * step_ms / 1e3 if self._mean_step_s else step_ms / 1e3
        self._metrics.step_done(step_ms / 1e3, work.num_ranks)
        for job_step in work.job_steps:
            open_job = self._table.get(job_step.job_id)
            if job_step.step == 1:
                open_job.started_s = started_s
            open_job.was_warm = open_job.was_warm and all(report.was_warm for report in reports)
            failure = agreed_failure(job_step.job_id, reports)
            if open_job.outcome is None and failure is not None:
                self._table.fail(open_job, failure.error)
                self._drop(open_job)
            else:
                self._publish_step(open_job, job_step, step_ms, work.num_ranks, flight)

    def _publish_step(self, open_job: OpenJob, done: JobStep, step_ms: float, num_ranks: int, flight: Flight) -> None:
        job_id, num_steps = done.job_id, open_job.job.num_steps
        open_job.num_steps_done = done.step
        self._table.publish(
            job_id, StepDone(job_id=job_id, step=done.step, num_steps=num_steps, step_ms=step_ms, num_ranks=num_ranks)
        )
        if done.emit == "preview":
            self._table.publish(job_id, PreviewReady(job_id=job_id, step=done.step, latents=flight.latents[job_id]))
        if done.emit == "final":
            queue_s = open_job.started_s - open_job.submitted_s
            denoise_s = self._clock.now_s() - open_job.started_s
            latents = flight.latents[job_id]
            if open_job.outcome is None and not open_job.was_warm:
                self._metrics.job_was_cold()
            self._table.publish(
                job_id,
                JobDone(
                    job_id=job_id,
                    latents=latents,
                    queue_s=queue_s,
                    denoise_s=denoise_s,
                    was_warm=open_job.was_warm,
                ),
            )

    def _drop(self, open_job: OpenJob) -> None:
        # Before it is scheduled the job's admission is under way, and does this when it is through.
        if open_job.is_scheduled:
            self._scheduler.drop(open_job.job.job_id)
            self._wake_schedule.set()

    def _retry_after_s(self) -> float:
        """Until the next running job ends, if all of them take turns."""
        steps_left = self._scheduler.num_steps_left.values()
        return max(1.0, min(steps_left, default=0) * len(steps_left) * self._mean_step_s)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, GangBrokenError):
                logger.error("the scheduler failed", exc_info=error)
                error = GangBrokenError(f"the scheduler failed: {error!r}")
            self.break_gang(error)


def agreed_failure(job_id: str, reports: Sequence[StepReport]) -> JobFailure | None:
    """How a job failed, if it did. Ranks that disagree on that no longer hold the same state: ``GangBrokenError``."""
    failures = [failure for report in reports for failure in report.failures if failure.job_id == job_id]
    shared = [failure for failure in failures if failure.shared]
    if shared and (len(shared) < len(reports) or len({type(failure.error) for failure in shared}) > 1):
        told = "; ".join(f"{type(failure.error).__name__}: {failure.error}" for failure in shared)
        raise GangBrokenError(f"{len(shared)} of {len(reports)} ranks failed job {job_id}: {told}")
    return failures[0] if failures else None
