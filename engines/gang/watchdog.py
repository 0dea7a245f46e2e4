"""Watches the ranks: a deadline for each step while it is in flight, and a call to each that ends when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from engines.gang.config import GangConfig
from engines.gang.errors import GangBrokenError
from engines.gang.job import Job
from engines.gang.plan import StepPlan, StepReport

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

    def __init__(self, config: GangConfig, ranks: Sequence[Any]) -> None:
        self._config = config
        self._warm: set[Hashable] = set()
        self._watches = [asyncio.ensure_future(answer_of(i, rank.watch.remote())) for i, rank in enumerate(ranks)]
        self.is_cold = False
        """Whether the step in flight may be compiling, which can keep a rank from answering a ping."""

    async def watch(self) -> None:
        """Returns never; raises ``GangBrokenError`` when a rank dies, also between steps."""
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        raise next(error for error in _errors(self._watches))

    async def reports(self, flight: Flight, jobs: Mapping[str, Job]) -> list[StepReport]:
        """All ranks' reports, by rank. ``GangBrokenError`` if one fails or outlasts the deadline, which starts now."""
        keys = dict(self._warmth_keys(flight.plan, jobs))
        self.is_cold = not all(keys.values())
        deadline_s = self._config.start_deadline_s if self.is_cold else self._config.step_deadline_s
        reports = await self._answers(flight, deadline_s)
        self._warm.update(keys)
        self.is_cold = False
        return reports

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()

    async def _answers(self, flight: Flight, deadline_s: float) -> list[StepReport]:
        answers = [asyncio.ensure_future(answer_of(rank, ref)) for rank, ref in enumerate(flight.reports)]
        try:
            _, late = await asyncio.wait(answers, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            for error in _errors(answers):
                raise await self._explain(error)
            if late:
                raise GangBrokenError(_describe_late(answers, flight.plan, deadline_s), "deadline")
            return [answer.result() for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()

    def _warmth_keys(self, plan: StepPlan, jobs: Mapping[str, Job]) -> Iterable[tuple[Hashable, bool]]:
        """What each work of the plan warms up, and whether it is warm by now."""
        for work in plan.works:
            for job_step in work.job_steps:
                shape = jobs[job_step.job_id].shape
                key = (job_step.job_id if shape is None else shape, work.width, shape is None)
                yield key, key in self._warm or (shape is None and job_step.step > 1)

    async def _explain(self, error: BaseException) -> BaseException:
        await asyncio.wait(self._watches, timeout=DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        return next(_errors(self._watches), error)


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
