"""Watches the ranks: a deadline for each step while it is in flight, and a call to each that ends when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from engines.gang.clock import Clock
from engines.gang.config import GangConfig
from engines.gang.errors import GangBrokenError
from engines.gang.job import Job
from engines.gang.step_plan import StepPlan, StepReport, Work

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 0.5
"""How long news of a dead rank may take. Its peers see a failed exchange first, and that is the lesser explanation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A plan that was sent: one report per rank to come, and the latents that it emits, by job."""

    plan: StepPlan
    reports: tuple[Any, ...]
    latents: Mapping[str, Any]


class Watchdog:
    """Must be made in the gang's event loop."""

    def __init__(self, config: GangConfig, ranks: Sequence[Any], clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._warm: set[Hashable] = set()
        """Shapes, each with the ranks that found everything ready when they last worked on it."""
        self._watches = [asyncio.ensure_future(answer_of(i, rank.watch.remote())) for i, rank in enumerate(ranks)]
        self.is_cold = False
        """Whether the step in flight may compile or capture, which can keep a rank from answering a ping."""

    async def watch(self) -> None:
        """Returns never; raises ``GangBrokenError`` when a rank dies, also between steps."""
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        raise next(error for error in _errors(self._watches))

    async def reports(self, flight: Flight, jobs: Mapping[str, Job]) -> list[StepReport]:
        """All ranks' reports, by rank. ``GangBrokenError`` if one fails or outlasts the deadline, which starts now."""
        works = flight.plan.works
        self.is_cold = not all(self._is_warm(work, jobs) for work in works)
        deadline_s = self._config.start_deadline_s if self.is_cold else self._config.step_deadline_s
        reports = await self._answers(flight, deadline_s)
        for work in works:
            if not any(reports[rank].predicted for rank in work.ranks):
                continue
            found_ready = all(reports[rank].was_warm for rank in work.ranks)
            note = self._warm.update if found_ready else self._warm.difference_update
            note(_warmth_keys(work, jobs))
        self.is_cold = False
        return reports

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()

    async def _answers(self, flight: Flight, deadline_s: float) -> list[StepReport]:
        answers = [asyncio.ensure_future(answer_of(rank, ref)) for rank, ref in enumerate(flight.reports)]
        try:
            await self._wait(answers, deadline_s, asyncio.FIRST_EXCEPTION)
            for error in _errors(answers):
                raise await self._explain(error)
            if not all(answer.done() for answer in answers):
                raise GangBrokenError(_describe_late(answers, flight.plan, deadline_s), "deadline")
            return [answer.result() for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()

    def _is_warm(self, work: Work, jobs: Mapping[str, Job]) -> bool:
        first_steps = (step for step in work.job_steps if jobs[step.job_id].shape is None and step.step == 1)
        return not any(first_steps) and self._warm.issuperset(_warmth_keys(work, jobs))

    async def _explain(self, error: BaseException) -> BaseException:
        await self._wait(self._watches, DEATH_NOTICE_S, asyncio.FIRST_COMPLETED)
        return next(_errors(self._watches), error)

    async def _wait(self, tasks: Sequence[asyncio.Task[Any]], at_most_s: float, return_when: str) -> None:
        """Waits as ``asyncio.wait`` does, by the gang's clock: the tasks go on in any case."""
        with suppress(TimeoutError):
            async with self._clock.timeout(at_most_s):
                await asyncio.wait(tasks, return_when=return_when)


def _warmth_keys(work: Work, jobs: Mapping[str, Job]) -> Iterator[Hashable]:
    """What a work warms up: the shapes of its jobs, on its own ranks."""
    shapes = (jobs[job_id].shape for job_id in work.job_ids)
    return ((shape, work.ranks) for shape in shapes if shape is not None)


async def answer_of(rank: int, ref: Any) -> Any:
    try:
        return await ref
    except RayActorError as error:
        raise GangBrokenError(f"rank {rank} died: {_first_line(error)}", "death") from error
    except Exception as error:
        logger.exception("rank %d failed", rank)
        raise GangBrokenError(f"rank {rank} failed: {_last_line(error)}", "error") from error


def _errors(tasks: Iterable[asyncio.Task[Any]]) -> Iterator[BaseException]:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            yield error


def _describe_late(answers: Sequence[asyncio.Task[Any]], plan: StepPlan, deadline_s: float) -> str:
    late = [rank for rank, answer in enumerate(answers) if not answer.done()]
    steps = ", ".join(f"{s.step} of job {s.job_id}" for work in plan.works for s in work.job_steps) or "no job"
    return f"ranks {late} did not finish a step ({steps}) within {deadline_s:g} s"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
