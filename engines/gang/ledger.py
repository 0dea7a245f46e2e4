"""Steps in flight and the ranks' reports: when ranks are free, step times, and the jobs' events."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.gang.errors import GangBrokenError
from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import lead_s
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.jobs.job import JobDone, PreviewReady, Progress
from engines.gang.jobs.job_table import JobTable, OpenJob
from engines.gang.jobs.step_plan import JobFailure, JobStep, StepReport, Work
from engines.gang.metrics import GangMetrics

EtaOf = Callable[[OpenJob, int], float | None]
"""Returns the seconds until a job is done, after its given step."""


@dataclass(kw_only=True, slots=True, eq=False)
class InFlightStep:
    """A step sent to the ranks of one team, or to the ranks outside all teams."""

    work: Work | None
    """None for the ranks outside all teams."""
    pending: Mapping[int, Any]
    """The pending report of each rank."""
    latents: Mapping[str, Any] = field(default_factory=dict)
    """Latents from the lead rank, by job."""
    predicted_s: float = 0.0
    """0 without a measurement."""
    started_s: float | None = None
    """Time at which all earlier steps of its ranks were reported; None where ranks report early."""
    reported_s: float = 0.0
    """Time of the last report of its ranks; 0 before."""
    running_s: float = 0.0
    """Time that its ranks' devices had spent in it by then."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all ranks have reported."""
    jobs: tuple[OpenJob, ...] = ()
    """The jobs of ``work``, once all ranks have reported."""
    was_warm: bool = False
    """True if no rank compiled or captured anything; False before all have reported."""
    took_ms: list[float] = field(default_factory=list)
    """Step time of each rank that has reported it."""

    @property
    def begun_s(self) -> float:
        """Time at which its ranks' devices began it, once all have reported; on CPUs, time of the last report."""
        return self.reported_s - self.running_s

    def left_s(self, expected_s: float, now_s: float) -> float:
        return max(0.0, expected_s - (0.0 if self.started_s is None else now_s - self.started_s))


class Ledger:
    """Processes every report once.

    Ranks on GPUs report a step early: when the step before it has ended and its own calls have returned. A later report
    then carries its time.
    Ranks run their steps in the order of sending.
    """

    def __init__(
        self,
        config: GangConfig,
        table: JobTable,
        metrics: GangMetrics,
        step_times: StepTimes,
        clock: Clock,
        *,
        same_bytes: bool = True,
    ) -> None:
        """Create an empty ledger. ``same_bytes``: see ``JobDone``."""
        self._ranks, self._reports_early = range(config.num_ranks), config.gpus_per_rank > 0
        self._table, self._metrics, self._step_times, self._clock = table, metrics, step_times, clock
        self._same_bytes = same_bytes
        self._in_flight: dict[InFlightStep, None] = {}
        self._sent: dict[int, InFlightStep] = {}
        """The last step sent to each rank."""
        self._reported: dict[int, InFlightStep] = {}
        """The last step reported by each rank."""
        self._untimed: dict[tuple[int, int], InFlightStep] = {}
        """Reported steps whose times are still missing, by plan and rank."""
        self._moves_ms: defaultdict[int, list[float]] = defaultdict(list)
        """Times of moves by plan, until all ranks have reported."""

    # Steps in flight.

    @property
    def job_ids(self) -> list[str]:
        """The jobs with a step in flight."""
        return [job_id for step in self._in_flight if step.work is not None for job_id in step.work.job_ids]

    def send(self, step: InFlightStep) -> None:
        self._in_flight[step] = None
        self._sent.update(dict.fromkeys(step.pending, step))

    def start(self, step: InFlightStep, now_s: float) -> None:
        """Record that all earlier steps of its ranks were reported."""
        if not self._reports_early:
            step.started_s = now_s

    def ends(self, ranks: Iterable[int]) -> list[asyncio.Event]:
        """Return the events that are set once these ranks have reported all steps sent so far."""
        lasts = {self._sent[rank]: None for rank in ranks if rank in self._sent}
        return [step.ended for step in lasts]

    def free_ranks(self, plans_ahead: int, now_s: float) -> set[int]:
        """Return the ranks with fewer than ``plans_ahead`` pending steps, all of which end soon (``lead_s``)."""
        return {rank for rank in self._ranks if self._free_in_s(rank, plans_ahead, now_s) == 0}

    def next_free_in_s(self, plans_ahead: int, now_s: float) -> float | None:
        """Return the seconds until the next rank is free by the clock; None if that needs a report."""
        waits_s = (self._free_in_s(rank, plans_ahead, now_s) for rank in self._ranks)
        return min((wait_s for wait_s in waits_s if 0 < wait_s < math.inf), default=None)

    def busy_s(self, now_s: float, step_s: Callable[[Work], float]) -> float:
        """Return the seconds until all sent steps end; ``step_s`` predicts unmeasured ones."""
        expected_s = {
            step: step.predicted_s or (0.0 if step.work is None else step_s(step.work)) for step in self._in_flight
        }
        return max(
            self._reported_left_s(rank, now_s)
            + sum(step.left_s(expected_s[step], now_s) for step in self._unreported(rank))
            for rank in self._ranks
        )

    def _free_in_s(self, rank: int, plans_ahead: int, now_s: float) -> float:
        before = self._unreported(rank)
        if len(before) >= plans_ahead:
            return math.inf
        left_s = self._reported_left_s(rank, now_s) + sum(step.left_s(step.predicted_s, now_s) for step in before)
        last_s = self._sent[rank].predicted_s if rank in self._sent else 0.0
        return max(0.0, left_s - lead_s(last_s))

    def _unreported(self, rank: int) -> list[InFlightStep]:
        return [step for step in self._in_flight if step.work is not None and rank in step.pending]

    def _reported_left_s(self, rank: int, now_s: float) -> float:
        """Return the seconds left of a step that the rank reported early."""
        step = self._reported.get(rank)
        if step is None or not self._reports_early:
            return 0.0
        return max(0.0, step.begun_s + step.predicted_s - now_s)

    def abandon(self) -> None:
        """Forget the steps in flight: the gang has ended, with their jobs, and no rank will report on them."""
        self._in_flight.clear()

    def interrupt(self) -> None:
        """Record that no step follows its predecessor without a gap: the gang was asleep between them."""
        self._reported.clear()

    # Reports.

    def end(self, step: InFlightStep) -> None:
        """Record that all ranks of ``step`` have reported."""
        step.reported_s = self._clock.now_s()
        step.ended.set()
        del self._in_flight[step]

    def hear(
        self, step: InFlightStep, reports: Mapping[int, StepReport], started_s: float, eta_s: EtaOf
    ) -> list[OpenJob]:
        """Process the reports of all ranks of ``step`` and publish its jobs' events. Return the failed jobs.

        Raise ``GangBrokenError`` if ranks disagree about a failure.
        """
        if switch_ms := max((report.switch_ms for report in reports.values()), default=0.0):
            self._step_times.hear_switch(switch_ms / 1e3)
        for report in reports.values():
            self._hear_move(report)
        if step.work is not None:
            step.jobs = tuple(self._table.get(job_id) for job_id in step.work.job_ids)
            step.was_warm = all(report.was_warm for report in reports.values())
            step.running_s = min(report.running_ms for report in reports.values()) / 1e3
            self._untimed |= {(report.sequence, report.rank): step for report in reports.values()}
        for report in reports.values():
            self._hear_times(report)
        return [] if step.work is None else self._publish(step, step.work, [*reports.values()], started_s, eta_s)

    def _hear_move(self, report: StepReport) -> None:
        """Record the shortest move time: all ranks meet for moves, and the last to arrive waits for no other."""
        if report.move_ms:
            moves_ms = self._moves_ms[report.sequence]
            moves_ms.append(report.move_ms)
            if len(moves_ms) == len(self._ranks):
                del self._moves_ms[report.sequence]
                self._step_times.hear_move(min(moves_ms) / 1e3)

    def _hear_times(self, report: StepReport) -> None:
        for sequence, step_ms in report.ended_ms.items():
            if (step := self._untimed.pop((sequence, report.rank), None)) is not None:
                step.took_ms.append(step_ms)
                if len(step.took_ms) == len(step.pending):
                    self._count(step)

    def _count_rest(self, job: OpenJob) -> None:
        """Count a finished job's untimed steps by the reports so far: its lead rank has reported all of them."""
        partly_timed = {key: step for key, step in self._untimed.items() if job in step.jobs and step.took_ms}
        for key in partly_timed:
            del self._untimed[key]
        for step in dict.fromkeys(partly_timed.values()):
            self._count(step)

    def _count(self, step: InFlightStep) -> None:
        """Charge a step to its jobs and the metrics.

        A team on GPUs begins when its last rank is ready, and ends together. Its step time is the shortest of its
        ranks', since the rest is waiting. On CPUs it is the longest: the lead rank also returns latents.
        """
        assert step.work is not None
        num_ranks = step.work.num_ranks
        step_s = (min if self._reports_early else max)(step.took_ms) / 1e3
        self._metrics.step_done(step_s, num_ranks)
        for job_step, job in zip(step.work.job_steps, step.jobs, strict=True):
            job.gpu_s += step_s * num_ranks / len(step.jobs)
            if step.was_warm and job_step.step not in job.job.idle_steps:
                job.warm_step_s, job.warm_step = step_s, job_step.step

    def _hear_interval(self, step: InFlightStep, work: Work, reports: Sequence[StepReport]) -> None:
        """Measure a step as the time between the ends of the job's previous step and its own.

        On GPUs it is the time between the begins of the two. A step with latents is reported at its own end: intervals
        next to such a report are skipped.
        """
        lasts = [self._reported.get(rank) for rank in work.ranks]
        self._reported.update(dict.fromkeys(work.ranks, step))
        last = lasts[0]
        if last is None or last.work is None or len(work.job_steps) > 1 or work.emits or last.work.emits:
            return
        if not all(other is not None and _precedes(other.work, work) for other in lasts):
            return
        if not all(report.was_warm and report.predicted for report in reports):  # a job that failed makes no forwards
            return
        job, number = step.jobs[0].job, work.job_steps[0].step
        is_alike = job.at(number).shape == job.at(number - 1).shape
        # Reports run a step ahead of the GPU: the interval may be that of an idle step, or of one in an earlier stage.
        if not job.idle_steps and is_alike:
            self._step_times.hear_step(job.at(number), work.num_ranks, step.begun_s - last.begun_s)

    # Events of jobs.

    def _publish(
        self, step: InFlightStep, work: Work, reports: Sequence[StepReport], started_s: float, eta_s: EtaOf
    ) -> list[OpenJob]:
        self._hear_interval(step, work, reports)
        failed = []
        for job_step, job in zip(work.job_steps, step.jobs, strict=True):
            if job_step.step == 1:
                job.started_s = started_s
            job.was_warm = job.was_warm and step.was_warm
            failure = agreed_failure(job_step.job_id, reports)
            if job.outcome is None and failure is not None:
                self._table.fail(job, failure.error)
                failed.append(job)
            else:
                if job_step.emit == "final":
                    self._count_rest(job)
                self._publish_step(job, job_step, work.num_ranks, step.latents.get(job_step.job_id), eta_s)
        step.latents = {}  # the events hold them; this step may stay referenced for long
        return failed

    def _publish_step(self, job: OpenJob, done: JobStep, num_ranks: int, latents: Any, eta_s: EtaOf) -> None:
        job_id = done.job_id
        job.num_steps_done = done.step
        event = Progress(
            job_id=job_id,
            step=done.step,
            num_steps=job.job.num_steps,
            num_ranks=num_ranks,
            eta_s=eta_s(job, done.step),
            gpu_s=job.gpu_s,
        )
        self._table.publish(job_id, event)
        if done.emit == "preview":
            self._table.publish(job_id, PreviewReady(job_id=job_id, step=done.step, latents=latents))
        if done.emit == "final":
            if job.outcome is None and not job.was_warm:
                self._metrics.job_was_cold()
            result = JobDone(
                job_id=job_id,
                latents=latents,
                queue_s=job.started_s - job.submitted_s,
                denoise_s=self._clock.now_s() - job.started_s,
                was_warm=job.was_warm,
                gpu_s=job.gpu_s,
                same_bytes=self._same_bytes,
            )
            self._table.publish(job_id, result)


def _precedes(last: Work | None, work: Work) -> bool:
    """Return whether ``work`` is the next step of the same job on the same ranks."""
    if last is None:
        return False
    step, before = work.job_steps[0], last.job_steps[0]
    return last.ranks == work.ranks and (before.job_id, before.step + 1) == (step.job_id, step.step)


def agreed_failure(job_id: str, reports: Sequence[StepReport]) -> JobFailure | None:
    """Return the job's failure, if any. Raise ``GangBrokenError`` if ranks disagree: their states then differ."""
    failures = [failure for report in reports for failure in report.failures if failure.job_id == job_id]
    shared = [failure for failure in failures if failure.shared]
    if shared and (len(shared) < len(reports) or len({type(failure.error) for failure in shared}) > 1):
        errors = "; ".join(f"{type(failure.error).__name__}: {failure.error}" for failure in shared)
        raise GangBrokenError(f"{len(shared)} of {len(reports)} ranks failed job {job_id}: {errors}")
    return failures[0] if failures else None
