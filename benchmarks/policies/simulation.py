"""Simulation of a gang by discrete events: the real scheduler and policies, with the steps' times from a table.

Ranks work in the order of their plans. A step begins when all ranks of its team are free. A rank has a limited number
of plans ahead, and gets the next one shortly before the last one ends. No time passes between a step and the next plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from engines.gang.eta.prediction import StepPrediction, lead_s, shape_name
from engines.gang.jobs.job import Job
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.jobs.step_plan import StepPlan, Work
from engines.gang.policies.policy import Policy

StepTable = Mapping[str, Mapping[int, float]]
"""Seconds of a step by shape and number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A picture of ``shape`` that comes ``at_s``."""

    at_s: float
    shape: str
    num_steps: int
    fields: Mapping[str, object] = field(default_factory=dict)


class Span(NamedTuple):
    """Ranks' work from ``begin_s`` to ``end_s``; ``rank_s`` is the sum over the ranks."""

    begin_s: float
    end_s: float
    rank_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedGang:
    """A gang and its limits."""

    steps: StepTable
    num_ranks: int
    elastic: bool = False
    team_sizes: tuple[int, ...] | None = None
    max_running_jobs: int = 4
    plans_ahead: int = 2
    move_s: float = 0.0012
    encode_s: float = 0.0
    decode_s: float = 0.0
    """Time added to each picture, which does not delay others; so is ``encode_s``."""
    refuses_late: bool = False
    """Pictures that would miss their deadline, by prediction, are refused."""

    def prediction(self) -> StepPrediction:
        """Return a prediction that knows the table."""
        pairs = ((name, size, s) for name, by_size in self.steps.items() for size, s in by_size.items())
        return StepPrediction(measured={(shape_name(name), size): s for name, size, s in pairs})


@dataclass(slots=True)
class Simulation:
    """One run. Dictionaries have the arrival's number as key."""

    gang: SimulatedGang
    policy: Policy
    prediction: StepPrediction | None = None
    keeps_records: bool = True
    """True if the next three fields have entries of all pictures; else ``latencies_s`` alone, until ``pop_done``."""
    latencies_s: dict[int, float] = field(default_factory=dict)
    """Without the refused."""
    predicted_s: dict[int, float] = field(default_factory=dict)
    """Latencies that were predicted at arrival."""
    steps: dict[int, list[Span]] = field(default_factory=dict)
    num_moves: int = 0
    _scheduler: Scheduler = field(init=False)
    _arrivals: dict[int, Arrival] = field(default_factory=dict)
    """Arrivals of pictures that are not done, by number."""
    _now_s: float = 0.0
    _under_way: list[Work] = field(default_factory=list)
    _ready_s: list[float] = field(default_factory=list)
    _leads_s: list[float] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)
    _events: list[tuple[float, int, Arrival | Work | None, int]] = field(default_factory=list)
    _ties: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        gang = self.gang
        self._scheduler = Scheduler(
            num_ranks=gang.num_ranks,
            max_running_jobs=gang.max_running_jobs,
            policy=self.policy,
            prediction=self.prediction or gang.prediction(),
            team_sizes=gang.team_sizes,
            elastic=gang.elastic,
        )
        self._ready_s = [0.0] * gang.num_ranks
        self._leads_s = [0.0] * gang.num_ranks
        self._depths = [0] * gang.num_ranks

    def run(self, arrivals: Sequence[Arrival]) -> dict[int, float]:
        """Return the seconds from arrival to picture by index, without the refused."""
        for number, arrival in enumerate(arrivals):
            self.add(arrival, number)
        self.advance(math.inf)
        return self.latencies_s

    def add(self, arrival: Arrival, number: int) -> None:
        """Add a picture that comes at the time of the last ``advance`` or later."""
        self._arrivals[number] = arrival
        heapq.heappush(self._events, (arrival.at_s + self.gang.encode_s, next(self._ties), arrival, number))

    def advance(self, to_s: float) -> None:
        """Let everything happen up to ``to_s``."""
        while self._events and self._events[0][0] <= to_s:
            self._now_s, _, event, number = heapq.heappop(self._events)
            if isinstance(event, Arrival):
                self._arrive(event, number)
            elif event is not None:
                self._end_step(event)
            while plan := self._next_plan():
                self._send(plan)

    @property
    def next_s(self) -> float | None:
        """Time at which something happens next; None: never."""
        return self._events[0][0] if self._events else None

    def pop_done(self) -> list[int]:
        """Return the pictures that are done, and forget them."""
        done = [*self.latencies_s]
        self.latencies_s.clear()
        return done

    def left_s(self, now_s: float) -> dict[int, float]:
        """Return the seconds left of each open picture, as a gang reports them to routers (``open_work``)."""
        sent = {job_id for work in self._under_way for job_id in work.job_ids}
        sent_s, planned_s = max(0.0, max(self._ready_s) - now_s), self._scheduler.left_s()
        share_s = sent_s / len(sent) if sent else 0.0
        return {
            number: planned_s.get(str(number), 0.0) + (share_s if str(number) in sent else 0.0)
            for number in self._arrivals
        }

    def _next_plan(self) -> StepPlan | None:
        return self._scheduler.next_plan(free=self._free(), is_idle=not self._under_way, now_s=self._now_s)

    def _free(self) -> set[int]:
        return {rank for rank in range(self.gang.num_ranks) if self._is_free(rank)}

    def _is_free(self, rank: int) -> bool:
        is_soon = self._now_s >= self._ready_s[rank] - self._leads_s[rank]
        return not self._depths[rank] or (self._depths[rank] < self.gang.plans_ahead and is_soon)

    def _arrive(self, arrival: Arrival, number: int) -> None:
        job = Job(
            job_id=str(number),
            request=None,
            conditioning=None,
            num_steps=arrival.num_steps,
            shape=arrival.shape,
            **{"decode_s": self.gang.decode_s, **arrival.fields},  # type: ignore[arg-type]
        )
        if self.keeps_records:
            under_way_s = max(0.0, max(self._ready_s) - self._now_s)
            times_s = self._scheduler.finish_times_s(self._now_s, beside=(job,))
            done_s = self.gang.encode_s + under_way_s + times_s[job.job_id] + self.gang.decode_s
            self.predicted_s[number] = done_s
            if self.gang.refuses_late and job.deadline_s is not None and done_s > job.deadline_s:
                del self._arrivals[number]
                return
        self._scheduler.add(job, now_s=self._now_s)

    def _send(self, plan: StepPlan) -> None:
        if plan.moves:
            self.num_moves += len(plan.moves)
            begin_s = max(self._now_s, *self._ready_s)
            self._ready_s = [begin_s + self.gang.move_s * len(plan.moves)] * self.gang.num_ranks
        for work in plan.works:
            begin_s = max(self._now_s, *(self._ready_s[rank] for rank in work.ranks))
            end_s = begin_s
            for number in map(int, work.job_ids):
                arrival = self._arrivals[number]
                step_s = self.gang.steps[arrival.shape][work.num_ranks]
                if self.keeps_records:
                    self.steps.setdefault(number, []).append(Span(end_s, end_s + step_s, step_s * work.num_ranks))
                end_s += step_s
            lead = lead_s(end_s - begin_s)
            for rank in work.ranks:
                self._ready_s[rank] = end_s
                self._leads_s[rank] = lead
                self._depths[rank] += 1
            heapq.heappush(self._events, (max(self._now_s, end_s - lead), next(self._ties), None, 0))
            self._under_way.append(work)
            heapq.heappush(self._events, (end_s, next(self._ties), work, 0))

    def _end_step(self, work: Work) -> None:
        self._under_way.remove(work)
        for rank in work.ranks:
            self._depths[rank] -= 1
        for step in work.emits:
            if step.emit == "final":
                number = int(step.job_id)
                self.latencies_s[number] = self._now_s + self.gang.decode_s - self._arrivals.pop(number).at_s
