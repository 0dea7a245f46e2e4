"""Watchdog of running steps: a deadline for each, and a pending call to each rank that fails when it dies.

Ranks that hang without a step are found by the pings of ``Gang.check_health``, during a start by ``start``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError

from engines.core.resources import LRUCache
from engines.gang.errors import GangBrokenError
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import StepReport, Work
from engines.gang.ledger import InFlightStep

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 5.0
"""Longest time for news of a dead rank, and for a living rank's answer."""

MAX_WARM = 8
"""Shapes that a team counts as warm, the newest ones. Engines cache 16 or more shapes, and a job's branches may take
several. A larger number would give evicted shapes the deadline of warm ones."""


class Watchdog:
    """Must be made in the gang's event loop."""

    def __init__(self, config: GangConfig, ranks: Sequence[Any], clock: Clock) -> None:
        self._config = config
        self._ranks = ranks
        self._clock = clock
        self._warm: defaultdict[tuple[int, ...], LRUCache[None]] = defaultdict(lambda: LRUCache(MAX_WARM))
        """Shapes by team that were warm in its last step with them."""
        self._watches = [asyncio.ensure_future(answer_of(i, rank.watch.remote())) for i, rank in enumerate(ranks)]
        self._num_cold = 0

    @property
    def is_cold(self) -> bool:
        """True if a step in flight may compile or capture, which can keep a rank from answering a ping."""
        return self._num_cold > 0

    async def watch(self) -> None:
        """Wait for ever; raise ``GangBrokenError`` when a rank dies, also between steps."""
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        raise next(error for error in _errors(self._watches))

    async def reports(self, step: InFlightStep, jobs: Mapping[str, Job]) -> dict[int, StepReport]:
        """Return the reports by rank. ``GangBrokenError`` if a rank fails, or exceeds the deadline from now."""
        work = step.work
        is_cold = work is not None and not self._is_warm(work, jobs)
        deadline_s = self._config.start_deadline_s if is_cold else self._config.step_deadline_s
        self._num_cold += is_cold
        try:
            reports = await self._answers(step, deadline_s)
        finally:
            self._num_cold -= is_cold
        if work is not None and any(report.predicted for report in reports.values()):
            was_warm = all(report.was_warm for report in reports.values())
            warm = self._warm[work.ranks]
            for shape in _shapes(work, jobs):
                if was_warm:
                    warm.get(shape, lambda: None)
                else:
                    warm.drop(shape)
        return reports

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()

    async def _answers(self, step: InFlightStep, deadline_s: float) -> dict[int, StepReport]:
        answers = {rank: asyncio.ensure_future(answer_of(rank, ref)) for rank, ref in step.pending.items()}
        try:
            await self._wait(tuple(answers.values()), deadline_s, asyncio.FIRST_EXCEPTION)
            for error in _errors(answers.values()):
                raise await self._explain(error)
            if not all(answer.done() for answer in answers.values()):
                raise GangBrokenError(_describe_late(answers, step.work, deadline_s), "deadline")
            return {rank: answer.result() for rank, answer in answers.items()}
        finally:
            for answer in answers.values():
                answer.cancel()

    def _is_warm(self, work: Work, jobs: Mapping[str, Job]) -> bool:
        first_steps = (step for step in work.job_steps if jobs[step.job_id].shape is None and step.step == 1)
        return not any(first_steps) and all(shape in self._warm[work.ranks] for shape in _shapes(work, jobs))

    async def _explain(self, error: BaseException) -> BaseException:
        """Return a rank's death if one died: its peers see a failed exchange earlier. Else return ``error``."""
        pings = [asyncio.ensure_future(answer_of(i, rank.ping.remote())) for i, rank in enumerate(self._ranks)]
        answered = asyncio.ensure_future(asyncio.wait(pings))
        try:
            await self._wait((*self._watches, answered), DEATH_NOTICE_S, asyncio.FIRST_COMPLETED)
        finally:
            for task in (answered, *pings):
                task.cancel()
        return [*_errors((*self._watches, *pings)), error][0]

    async def _wait(self, tasks: Sequence[asyncio.Future[Any]], limit_s: float, return_when: str) -> None:
        """Wait like ``asyncio.wait``, by the gang's clock; pending tasks continue."""
        with suppress(TimeoutError):
            async with self._clock.timeout(limit_s):
                await asyncio.wait(tasks, return_when=return_when)


def _shapes(work: Work, jobs: Mapping[str, Job]) -> set[Hashable]:
    """Return the shapes of the steps that have one."""
    return {jobs[step.job_id].at(step.step).shape for step in work.job_steps} - {None}


async def any_is_set(*events: asyncio.Event, within_s: float | None = None) -> None:
    """Return once one of ``events`` is set, or after ``within_s`` seconds (None: no limit)."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def answer_of(rank: int, ref: Any) -> Any:
    try:
        return await ref
    except RayActorError as error:
        raise GangBrokenError(f"rank {rank} died: {_first_line(error)}", "death") from error
    except Exception as error:
        logger.exception("rank %d failed", rank)
        raise GangBrokenError(f"rank {rank} failed: {_last_line(error)}", "error") from error


async def answers_within(clock: Clock, limit_s: float, refs: Iterable[Any], action: str) -> list[Any]:
    """Return the answers of all ranks to one call. ``GangBrokenError`` if one fails, dies, or is late.

    Iterating ``refs`` makes the calls, in the context of this coroutine's task.
    """
    answers = [asyncio.ensure_future(answer_of(i, ref)) for i, ref in enumerate(refs)]
    together = asyncio.gather(*answers)
    try:
        with suppress(TimeoutError):
            async with clock.timeout(limit_s):
                return list(await asyncio.shield(together))
        late = [rank for rank, answer in enumerate(answers) if not answer.done()]
        raise GangBrokenError(f"ranks {late} did not {action} within {limit_s:g} s", "deadline")
    finally:
        together.cancel()
        await asyncio.gather(together, return_exceptions=True)


def _errors(tasks: Iterable[asyncio.Task[Any]]) -> Iterator[BaseException]:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            yield error


def _describe_late(answers: Mapping[int, asyncio.Task[Any]], work: Work | None, deadline_s: float) -> str:
    late = [rank for rank, answer in answers.items() if not answer.done()]
    job_steps = () if work is None else work.job_steps
    steps = ", ".join(f"{s.step} of job {s.job_id}" for s in job_steps) or "no job"
    return f"ranks {late} did not finish a step ({steps}) within {deadline_s:g} s"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
