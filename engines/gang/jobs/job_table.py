"""Open jobs, shared by the requests and the scheduler of a gang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.jobs.job import Job, JobDone, JobEvent, Progress
from engines.gang.metrics import GangMetrics, Outcome

NUM_REMEMBERED = 1000
"""Number of ended jobs, the newest, whose GPU time is remembered."""


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job, its pending events, and its outcome. Times are those of ``clock``."""

    job: Job
    """The request as the gang admitted it."""
    clock: Clock
    """Clock of all times here."""
    submitted_s: float
    """Time of the gang's admission."""
    started_s: float = 0.0
    """Begin of its first step, known once that is reported; 0 before."""
    events: asyncio.Queue[JobEvent | Exception] = field(default_factory=asyncio.Queue)
    """Events that its submitter has not read yet; an exception is the last one."""
    is_scheduled: bool = False
    """True if all ranks have answered to its admission: only then the scheduler knows it."""
    num_steps_done: int = 0
    """Reported steps."""
    was_warm: bool = True
    """True if no reported step compiled or captured anything."""
    gpu_s: float = 0.0
    """Rank-seconds of all measured steps."""
    warm_step_s: float | None = None
    """Time of the newest measured step that was warm and made a forward."""
    warm_step: int = 0
    """Number of that step."""
    outcome: Outcome | None = None
    """Outcome; None while it is open."""
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when neither this process nor a rank refers to the job's conditioning any more."""
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no rank will report on the job any more."""

    async def next_events(self, until_s: float) -> list[JobEvent | Exception]:
        """Return at least one event. Wait for more until ``until_s`` while the last one is a ``Progress``."""
        group = [await self.events.get()]
        while isinstance(group[-1], Progress):
            try:
                async with self.clock.timeout(until_s - self.clock.now_s()):
                    group.append(await self.events.get())
            except TimeoutError:
                break
        return group


class JobTable:
    """Open jobs by id. An ended job stays until the ranks have forgotten it, so that its id is not taken again."""

    def __init__(self, config: GangConfig, metrics: GangMetrics, clock: Clock) -> None:
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._jobs: dict[str, OpenJob] = {}
        self._spent_s: dict[str, float] = {}
        """GPU time of forgotten jobs, by id."""

    @property
    def jobs(self) -> Mapping[str, Job]:
        return {job_id: open_job.job for job_id, open_job in self._jobs.items()}

    @property
    def unscheduled(self) -> list[Job]:
        """Open jobs that are not scheduled yet."""
        jobs = self._jobs.values()
        return [open_job.job for open_job in jobs if open_job.outcome is None and not open_job.is_scheduled]

    @property
    def open_jobs(self) -> list[Job]:
        """Jobs that have not ended."""
        return [open_job.job for open_job in self._jobs.values() if open_job.outcome is None]

    @property
    def num_open(self) -> int:
        return sum(open_job.outcome is None for open_job in self._jobs.values())

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_open - self._config.max_running_jobs)

    def get(self, job_id: str) -> OpenJob:
        return self._jobs[job_id]

    async def spent_s(self, job_id: str) -> float:
        """Return the rank-seconds of a job that has ended, or is about to. Wait for its last reports.

        0 for an unknown job, one that broke with its gang, or one forgotten long ago.
        """
        if (open_job := self._jobs.get(job_id)) is not None:
            await open_job.forgotten.wait()
        return self._spent_s.get(job_id, 0.0)

    def open(self, job: Job, retry_after_s: float) -> OpenJob:
        """Add a job that ``check`` has passed. ``QueueFullError`` if the queue is full, unless it is ``accepted``."""
        num_waiting = self.num_waiting
        if not job.accepted and self.num_open >= self._config.max_running_jobs + self._config.max_waiting_jobs:
            self.refuse(QueueFullError(num_waiting, retry_after_s))
        open_job = OpenJob(job=job, clock=self._clock, submitted_s=self._clock.now_s())
        self._jobs[job.job_id] = open_job
        self._tell_open()
        return open_job

    def refuse(self, refusal: QueueFullError) -> NoReturn:
        self._metrics.job_ended("rejected")
        raise refusal

    def publish(self, job_id: str, event: JobEvent) -> None:
        open_job = self._jobs[job_id]
        if open_job.outcome is None:
            open_job.events.put_nowait(event)
            if isinstance(event, JobDone):
                self.end(open_job, "done")
                self.forget([job_id])

    def fail(self, open_job: OpenJob, error: Exception, outcome: Outcome = "failed") -> None:
        if open_job.outcome is None:
            open_job.events.put_nowait(error)
            self.end(open_job, outcome)

    def fail_all(self, error: GangBrokenError, in_flight: Iterable[str]) -> None:
        """Fail every open job. Jobs ``in_flight`` are marked as possible causes."""
        suspects = frozenset(in_flight)
        for job_id, open_job in self._jobs.items():
            self.fail(open_job, GangBrokenError(error.reason, error.cause, job_id in suspects), "broken")
            open_job.forgotten.set()
        self._jobs.clear()

    def end(self, open_job: OpenJob, outcome: Outcome) -> None:
        open_job.outcome = outcome
        self._metrics.job_ended(outcome)
        self._tell_open()

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            if (open_job := self._jobs.pop(job_id, None)) is not None:
                self._spent_s[job_id] = open_job.gpu_s
                open_job.forgotten.set()
        for job_id in [*self._spent_s][:-NUM_REMEMBERED]:
            del self._spent_s[job_id]

    def _tell_open(self) -> None:
        self._metrics.open_jobs(self.num_open - self.num_waiting, self.num_waiting)

    def check(self, job: Job) -> None:
        """Raise ``ValueError`` for a job without steps, or with an id in use."""
        if job.num_steps < 1:
            raise ValueError(f"a job has at least 1 step, not {job.num_steps}")
        if job.job_id in self._jobs:
            raise ValueError(f"job id {job.job_id!r} is in use: give every job its own")
