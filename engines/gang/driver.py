"""The scheduler task of a gang, the only caller of its ranks, and the tasks that collect their reports."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engines.gang.errors import GangBrokenError
from engines.gang.eta.admission import JobAdmission
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.gang_sleep import GangSleep
from engines.gang.jobs.job import Job, JobQueued
from engines.gang.jobs.job_table import JobTable, OpenJob
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.jobs.step_plan import JobFailure, StepPlan
from engines.gang.ledger import InFlightStep, Ledger
from engines.gang.metrics import GangMetrics
from engines.gang.policies.policy import make_policy
from engines.gang.rank import kill_ranks
from engines.gang.watchdog import Watchdog, answer_of, answers_within, any_is_set

logger = logging.getLogger(__name__)

LET_GO_S = 5.0
"""Limit of the time for which a job that has ended waits until ranks have its conditioning."""


def handed_on() -> GangBrokenError:
    return GangBrokenError("the gang takes no more jobs", "closed")


class Driver:
    """Sends plans at most ``plans_ahead`` ahead of the reports, and turns reports into the jobs' events.

    Requests only put jobs in and take events out. Serve cancels a request's child tasks recursively. A rank call in a
    request's context could vanish on some ranks and hang the others, so tasks have fresh contexts.
    """

    def __init__(
        self,
        config: GangConfig,
        ranks: Sequence[Any],
        team_sizes: tuple[int, ...],
        model: str,
        clock: Clock,
        step_times: StepTimes | None = None,
    ) -> None:
        self._config, self._model = config, model
        self._clock = clock
        self._ranks = ranks
        self._metrics = GangMetrics(model)
        self._table = JobTable(config, self._metrics, clock)
        self._step_times = step_times or StepTimes()
        self._watchdog = Watchdog(config, ranks, clock)
        self.scheduler = Scheduler(
            num_ranks=config.num_ranks,
            max_running_jobs=config.max_running_jobs,
            policy=make_policy(config.policy),
            prediction=self._step_times.prediction(),
            team_sizes=team_sizes,
            elastic=config.elastic,
            max_batch=config.max_batch,
        )
        same_bytes = not (config.elastic and len(team_sizes) > 1)
        self._ledger = Ledger(config, self._table, self._metrics, self._step_times, clock, same_bytes=same_bytes)
        self.rest = GangSleep(config, ranks, self._ledger, clock, self._metrics)
        self.admission = JobAdmission(
            self.scheduler, self._table, self._ledger, clock, config.max_wait_s, wake_up=lambda: self.rest.wake_up
        )
        self._submitted: deque[tuple[OpenJob, Any]] = deque()
        """Jobs that no rank has, each with its conditioning."""
        self._wake_schedule = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hands_on = False
        self.broken: GangBrokenError | None = None
        self.ended = asyncio.Event()
        """Set when the gang is broken, or closed."""

    # Called by the gang, from requests and health checks.

    def start(self) -> None:
        for coroutine in (self._schedule(), self._watchdog.watch()):
            self._spawn(coroutine)
        self._metrics.takes_jobs()

    @property
    def is_cold(self) -> bool:
        return self._watchdog.is_cold

    def open(self, job: Job) -> OpenJob:
        """Add a job, whose conditioning is held here only until it is sent to the ranks.

        Ray 2.60 never frees a small object in its owner's process if another one still holds it when its call ends.
        """
        if self.broken is not None:
            raise GangBrokenError(self.broken.reason, self.broken.cause)
        if self._hands_on:
            raise handed_on()
        conditioning, job = job.conditioning, replace(job, conditioning=None)
        self._table.check(job)
        eta_s, num_before = self.admission.admit(job), self._table.num_open
        open_job = self._table.open(job, max(1.0, self.admission.next_end_s() or 0.0))
        self._table.publish(job.job_id, JobQueued(job_id=job.job_id, eta_s=eta_s, num_before=num_before))
        self._submitted.append((open_job, conditioning))
        self._wake_schedule.set()
        return open_job

    async def move(self, *, asleep: bool) -> None:
        """Bring the weights of all ranks to the host, or back. ``GangBrokenError`` if the gang breaks meanwhile."""
        self.rest.want(asleep=asleep)
        self._wake_schedule.set()
        await self.rest.reached(asleep=asleep, ended=self.ended)
        if self.broken is not None:
            raise GangBrokenError(self.broken.reason, self.broken.cause)

    async def call_ranks(self, call: Callable[[Any], Any]) -> list[Any]:
        """Return the answers of all ranks to a call beside the steps, sent in a context of its own like all others.

        ``GangBrokenError`` if the gang is broken, or an answer is late.
        """
        if self.broken is not None:
            raise GangBrokenError(self.broken.reason, self.broken.cause)
        calls = (call(rank) for rank in self._ranks)
        answers = answers_within(self._clock, self._config.start_deadline_s, calls, "answer")
        return await asyncio.shield(asyncio.get_running_loop().create_task(answers, context=contextvars.Context()))

    async def spent_s(self, job_id: str) -> float:
        return await self._table.spent_s(job_id)

    def close(self, open_job: OpenJob) -> None:
        """Stop listening to a job. Cancel it if it has not ended."""
        if open_job.outcome is None:
            fields = open_job.job.log_fields | {"num_steps_done": open_job.num_steps_done}
            logger.info("job is cancelled", extra=fields)
            self._table.end(open_job, "cancelled")
            self._drop(open_job)

    async def let_go(self, open_job: OpenJob) -> None:
        """Return once the ranks have the job's conditioning, or it is sent to none: see ``open``.

        After ``LET_GO_S`` it returns anyway: the caller has left, and Ray keeps the object.
        """
        await any_is_set(open_job.let_go, self.ended, within_s=LET_GO_S)

    def hand_on(self) -> None:
        """Take no more jobs, and fail those without a step, for another gang. The others end here."""
        self._hands_on = True
        begun = {*self._ledger.job_ids}
        for job_id in self._table.jobs:
            open_job = self._table.get(job_id)
            if open_job.outcome is None and not open_job.num_steps_done and job_id not in begun:
                self._table.fail(open_job, handed_on(), "cancelled")
                self._drop(open_job)

    def stop(self, error: GangBrokenError) -> None:
        """End all tasks and fail all jobs."""
        if self.broken is None:
            self.broken = error
            self.ended.set()
            self._metrics.takes_none()
            self._table.fail_all(error, self._ledger.job_ids)
            self._ledger.abandon()
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
            if await self.rest.settle():
                self.scheduler.forget_additions()  # weights sleep as they were loaded
            now_s, ahead = self._clock.now_s(), self._config.plans_ahead
            free = self._ledger.free_ranks(ahead, now_s) if self.rest.may_work else set()  # drops need no weights
            plan = self.scheduler.next_plan(free=free, is_idle=not self._ledger.job_ids, now_s=now_s)
            if plan is not None:
                self._send(plan)
            else:  # same ``now_s``: no rank can become free between the two calls
                await self._wait(self._ledger.next_free_in_s(ahead, now_s))

    async def _wait(self, within_s: float | None) -> None:
        """Wait for a wake-up, or until a rank is free by the clock alone."""
        with suppress(TimeoutError):
            async with self._clock.timeout(within_s):
                await self._wake_schedule.wait()
        self._wake_schedule.clear()

    def _admit_submitted(self) -> None:
        while self._submitted:
            open_job, conditioning = self._submitted.popleft()
            if open_job.outcome is None:
                job = replace(open_job.job, conditioning=conditioning)
                refs = [rank.admit.remote(job) for rank in self._ranks]
                self._spawn(self._finish_admission(open_job, refs))
            else:
                open_job.let_go.set()
                self._table.forget([open_job.job.job_id])

    def _send(self, plan: StepPlan) -> None:
        """Send ``plan`` and follow each team separately: no team waits for another's longer step."""
        ranks = range(self._config.num_ranks) if plan.is_for_all else plan.working_ranks
        reports, latents = {}, {}
        for rank in ranks:
            emits = plan.emits_of(rank)
            returned = self._ranks[rank].execute.options(num_returns=1 + len(emits)).remote(plan)
            report, *emitted = returned if emits else [returned]
            reports[rank] = report
            latents.update({emit.job_id: ref for emit, ref in zip(emits, emitted, strict=True)})
        before = self._ledger.ends(ranks)
        steps = [
            InFlightStep(
                work=work,
                pending={rank: reports[rank] for rank in work.ranks},
                latents={emit.job_id: latents[emit.job_id] for emit in work.emits},
                predicted_s=self.admission.measured_s(work),
            )
            for work in plan.works
        ]
        if beside := {rank: reports[rank] for rank in ranks if rank not in plan.working_ranks}:
            steps.append(InFlightStep(work=None, pending=beside))
        for step in steps:
            # All ranks take part in moves, so each waits for the earlier steps of all.
            self._spawn(self._follow(step, before if plan.moves else self._ledger.ends(step.pending)))
        for step in steps:
            self._ledger.send(step)
        if plan.drops:
            self._spawn(self._forget(plan.drops, steps))

    # The tasks that wait for ranks.

    async def _finish_admission(self, open_job: OpenJob, refs: Sequence[Any]) -> None:
        answers: list[JobFailure | None] = await asyncio.gather(*(answer_of(i, ref) for i, ref in enumerate(refs)))
        open_job.let_go.set()
        failure = next((answer for answer in answers if answer is not None), None)
        open_job.is_scheduled = True
        if failure is not None:
            self._table.fail(open_job, failure.error)
        if open_job.outcome is None:
            self.scheduler.add(open_job.job, now_s=self._clock.now_s())
        else:
            self._drop(open_job)
        self._wake_schedule.set()

    async def _follow(self, step: InFlightStep, before: Sequence[asyncio.Event]) -> None:
        """Collect the reports of a step, once the steps ``before`` have ended: then its deadline begins."""
        for end in before:
            await end.wait()
        started_s = self._clock.now_s()
        self._ledger.start(step, started_s)
        reports = await self._watchdog.reports(step, self._table.jobs)
        self._ledger.end(step)
        self._wake_schedule.set()
        for failed in self._ledger.hear(step, reports, started_s, self.admission.eta_s):
            self._drop(failed)
        if step.work is not None and step.work.ends_a_job and self._step_times.changed():
            self.scheduler.learn(self._step_times.prediction())
            await asyncio.to_thread(self._step_times.save)

    async def _forget(self, job_ids: Sequence[str], steps: Sequence[InFlightStep]) -> None:
        for step in steps:
            await step.ended.wait()
        self._table.forget(job_ids)

    def _drop(self, open_job: OpenJob) -> None:
        # A job that is not scheduled yet is dropped at the end of its admission.
        if open_job.is_scheduled:
            self.scheduler.drop(open_job.job.job_id)
            self._wake_schedule.set()

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
