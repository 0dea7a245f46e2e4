"""What jobs' steps took, put together from what their ranks tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engines.gang.jobs.job_table import OpenJob
from engines.gang.jobs.step_plan import StepReport, Work
from engines.gang.metrics import GangMetrics


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A step, and what ranks of its team have told of it so far."""

    work: Work
    jobs: tuple[OpenJob, ...]
    was_warm: bool
    told_ms: list[float] = field(default_factory=list)


class Timesheet:
    """Counts a step, for its jobs and the metrics, once all of its ranks have told what it took: those with GPUs do so
    with the report of a later step, and of a cancelled job's last one perhaps long after it. A job that is done waits
    for none: the rank that handed out its latents has told of all its steps.

    ``reports_early``: ranks tell how long they were at a step themselves, as those with GPUs do. Their team began when
    the last of them was ready, and they end together, so the shortest of these times is the step's: what the others
    waited is nobody's work. Else it is the longest, that of the rank which hands out latents besides.
    """

    def __init__(self, metrics: GangMetrics, *, reports_early: bool) -> None:
        self._metrics = metrics
        self._time_of_team = min if reports_early else max
        self._entries: dict[tuple[int, int], _Entry] = {}
        """By the sequence of the plan and the rank, as long as that one is to tell."""

    def enter(self, work: Work, reports: Sequence[StepReport], jobs: Sequence[OpenJob]) -> None:
        """Takes note of a step of which the ranks of ``work`` have reported, for its ``jobs``."""
        entry = _Entry(work, tuple(jobs), all(report.was_warm for report in reports))
        self._entries |= {(report.sequence, report.rank): entry for report in reports}

    def hear(self, reports: Iterable[StepReport]) -> None:
        """Takes what ranks tell of steps that were entered."""
        for report in reports:
            for sequence, step_ms in report.ended_ms.items():
                if (entry := self._entries.pop((sequence, report.rank), None)) is not None:
                    entry.told_ms.append(step_ms)
                    if len(entry.told_ms) == entry.work.num_ranks:
                        self._count(entry)

    def close(self, job: OpenJob) -> None:
        """Counts what was told of the steps of a job that is done."""
        waiting = {key: entry for key, entry in self._entries.items() if job in entry.jobs and entry.told_ms}
        for key in waiting:
            del self._entries[key]
        for entry in dict.fromkeys(waiting.values()):
            self._count(entry)

    def _count(self, entry: _Entry) -> None:
        work, step_s = entry.work, self._time_of_team(entry.told_ms) / 1e3
        self._metrics.step_done(step_s, work.num_ranks)
        for step, open_job in zip(work.job_steps, entry.jobs, strict=True):
            open_job.gpu_s += step_s * work.num_ranks / len(entry.jobs)
            open_job.step_s = step_s
            if entry.was_warm and step.step not in open_job.job.idle_steps:
                open_job.warm_step_s = step_s
