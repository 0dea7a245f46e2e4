"""What was sent to ranks and is under way, and when each may be sent more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.gang.eta.lead import lead_s
from engines.gang.jobs.step_plan import Work


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
        before = self._before(rank)
        if len(before) >= plans_ahead:
            return math.inf
        left_s = self._reported_s(rank, now_s) + sum(self._left_s(one, one.predicted_s, now_s) for one in before)
        last_s = self._last[rank].predicted_s if rank in self._last else 0.0
        return max(0.0, left_s - lead_s(last_s))

    def busy_s(self, now_s: float, step_s: Callable[[Work], float]) -> float:
        """Returns after how long all ranks will have done what they were sent; ``step_s`` says what was never
        measured."""
        expected_s = {one: one.predicted_s or sum(map(step_s, one.works)) for one in self._under_way}
        return max(
            self._reported_s(rank, now_s) + sum(self._left_s(one, expected_s[one], now_s) for one in self._before(rank))
            for rank in range(self._num_ranks)
        )

    def _before(self, rank: int) -> list[Flight]:
        """Steps that it has not reported of."""
        return [flight for flight in self._under_way if flight.works and rank in flight.reports]

    def _reported_s(self, rank: int, now_s: float) -> float:
        """How long it will be at a step that it has reported of."""
        return max(0.0, self._busy_until_s.get(rank, now_s) - now_s)

    def _left_s(self, flight: Flight, expected_s: float, now_s: float) -> float:
        return max(0.0, expected_s - (now_s - self._started_s.get(flight, now_s)))

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
