"""What is under way, and who watches it: a deadline for each step, and a call to each rank that ends when it dies."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from engines.gang.clock import Clock
from engines.gang.config import GangConfig
from engines.gang.errors import GangBrokenError
from engines.gang.job import Job
from engines.gang.predictions.lead import lead_s
from engines.gang.step_plan import StepReport, Work

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 5.0
"""How long news of a dead rank may take, and a rank that is alive to say so."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Flight:
    """What was sent to the ranks of a team, or to those beside the teams in a plan that is for all: a report of each to
    come, by rank, and the latents that are emitted, by job. ``predicted_s`` is 0 where nothing was measured that says.
    ``ended`` is set when all reports are there."""

    works: tuple[Work, ...]
    reports: Mapping[int, Any]
    latents: Mapping[str, Any]
    predicted_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Traffic:
    """The flights under way of a gang with so many ranks. A rank takes what it is sent in order.

    ``reports_early``: a rank reports of a step, as one with a GPU does, when it begins, the one before it having ended.
    """

    def __init__(self, num_ranks: int, *, reports_early: bool = False) -> None:
        self._num_ranks, self._reports_early = num_ranks, reports_early
        self._under_way: dict[Flight, None] = {}
        self._last: dict[int, Flight] = {}
        self._started_s: dict[Flight, float] = {}
        self._busy_until_s: dict[int, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self.job_ids

    @property
    def works(self) -> list[Work]:
        """What is under way, in the order in which it was sent."""
        return [work for flight in self._under_way for work in flight.works]

    @property
    def job_ids(self) -> list[str]:
        """The jobs that have a step under way."""
        return [job_id for work in self.works for job_id in work.job_ids]

    def free_ranks(self, plans_ahead: int, now_s: float) -> set[int]:
        """Returns the ranks that may be sent a step: they have fewer before them, which end soon (``lead_s``)."""
        return {rank for rank in range(self._num_ranks) if self._free_in_s(rank, plans_ahead, now_s) == 0}

    def next_free_in_s(self, plans_ahead: int, now_s: float) -> float | None:
        """Returns when that will be true of another rank, though no report comes; None if it will not."""
        waits_s = (self._free_in_s(rank, plans_ahead, now_s) for rank in range(self._num_ranks))
        return min((wait_s for wait_s in waits_s if 0 < wait_s < math.inf), default=None)

    def _free_in_s(self, rank: int, plans_ahead: int, now_s: float) -> float:
        before = [flight for flight in self._under_way if flight.works and rank in flight.reports]
        if len(before) >= plans_ahead:
            return math.inf
        reported_s = max(0.0, self._busy_until_s.get(rank, now_s) - now_s)
        left_s = reported_s + sum(self._left_s(flight, now_s) for flight in before)
        last_s = self._last[rank].predicted_s if rank in self._last else 0.0
        return max(0.0, left_s - lead_s(last_s))

    def _left_s(self, flight: Flight, now_s: float) -> float:
        return max(0.0, flight.predicted_s - (now_s - self._started_s.get(flight, now_s)))

    def ends(self, ranks: Iterable[int]) -> list[asyncio.Event]:
        """Returns what is set when these ranks have done what they were sent so far."""
        lasts = {self._last[rank]: None for rank in ranks if rank in self._last}
        return [flight.ended for flight in lasts]

    def begin(self, flight: Flight) -> None:
        """Takes note of a flight that was sent."""
        self._under_way[flight] = None
        self._last.update(dict.fromkeys(flight.reports, flight))

    def start(self, flight: Flight, now_s: float) -> None:
        """Takes note of a flight before which all others of its ranks were reported of."""
        if not self._reports_early:
            self._started_s[flight] = now_s

    def end(self, flight: Flight, now_s: float) -> None:
        """Takes note of a flight whose reports are all there."""
        flight.ended.set()
        del self._under_way[flight]
        self._started_s.pop(flight, None)
        if self._reports_early and flight.works:
            self._busy_until_s.update(dict.fromkeys(flight.reports, now_s + flight.predicted_s))


class Watchdog:
    """Must be made in the gang's event loop."""

    def __init__(self, config: GangConfig, ranks: Sequence[Any], clock: Clock) -> None:
        self._config = config
        self._ranks = ranks
        self._clock = clock
        self._warm: set[Hashable] = set()
        """Shapes, each with the ranks that found everything ready when they last worked on it."""
        self._watches = [asyncio.ensure_future(answer_of(i, rank.watch.remote())) for i, rank in enumerate(ranks)]
        self._num_cold = 0

    @property
    def is_cold(self) -> bool:
        """Whether a step in flight may compile or capture, which can keep a rank from answering a ping."""
        return self._num_cold > 0

    async def watch(self) -> None:
        """Returns never; raises ``GangBrokenError`` when a rank dies, also between steps."""
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        raise next(error for error in _errors(self._watches))

    async def reports(self, flight: Flight, jobs: Mapping[str, Job]) -> dict[int, StepReport]:
        """Its reports, by rank. ``GangBrokenError`` if a rank fails or outlasts the deadline, which starts now."""
        is_cold = not all(self._is_warm(work, jobs) for work in flight.works)
        deadline_s = self._config.start_deadline_s if is_cold else self._config.step_deadline_s
        self._num_cold += is_cold
        try:
            reports = await self._answers(flight, deadline_s)
        finally:
            self._num_cold -= is_cold
        for work in flight.works:
            if not any(reports[rank].predicted for rank in work.ranks):
                continue
            found_ready = all(reports[rank].was_warm for rank in work.ranks)
            note = self._warm.update if found_ready else self._warm.difference_update
            note(_warmth_keys(work, jobs))
        return reports

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()

    async def _answers(self, flight: Flight, deadline_s: float) -> dict[int, StepReport]:
        answers = {rank: asyncio.ensure_future(answer_of(rank, ref)) for rank, ref in flight.reports.items()}
        try:
            await self._wait(tuple(answers.values()), deadline_s, asyncio.FIRST_EXCEPTION)
            for error in _errors(answers.values()):
                raise await self._explain(error)
            if not all(answer.done() for answer in answers.values()):
                raise GangBrokenError(_describe_late(answers, flight.works, deadline_s), "deadline")
            return {rank: answer.result() for rank, answer in answers.items()}
        finally:
            for answer in answers.values():
                answer.cancel()

    def _is_warm(self, work: Work, jobs: Mapping[str, Job]) -> bool:
        first_steps = (step for step in work.job_steps if jobs[step.job_id].shape is None and step.step == 1)
        return not any(first_steps) and self._warm.issuperset(_warmth_keys(work, jobs))

    async def _explain(self, error: BaseException) -> BaseException:
        """Returns the death of a rank, if one has died: its peers see a failed exchange before there is news of it, and
        that is the lesser explanation. Ranks that all answer a ping are alive, and nothing is waited for."""
        pings = [asyncio.ensure_future(answer_of(i, rank.ping.remote())) for i, rank in enumerate(self._ranks)]
        alive = asyncio.gather(*pings, return_exceptions=True)
        try:
            await self._wait((*self._watches, alive), DEATH_NOTICE_S, asyncio.FIRST_COMPLETED)
        finally:
            alive.cancel()
        return next(_errors((*self._watches, *pings)), error)

    async def _wait(self, tasks: Sequence[asyncio.Future[Any]], at_most_s: float, return_when: str) -> None:
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


def _describe_late(answers: Mapping[int, asyncio.Task[Any]], works: Iterable[Work], deadline_s: float) -> str:
    late = [rank for rank, answer in answers.items() if not answer.done()]
    steps = ", ".join(f"{s.step} of job {s.job_id}" for work in works for s in work.job_steps) or "no job"
    return f"ranks {late} did not finish a step ({steps}) within {deadline_s:g} s"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
