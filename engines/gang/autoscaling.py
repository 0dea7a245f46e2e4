"""The number of gangs of a model, by predicted seconds of work. Pure: no Ray, no clock, no results.

One ``GangScaler`` per model decides from what its gangs report. ``share_ranks`` divides a limited number of ranks among
models. Both are used by Ray Serve (``deployments.autoscaling``) and by ``benchmarks.simulate_cluster``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

LATE_SHARE, ALERT_SHARE = 0.02, 0.05
"""Shares of requests that may wait longer than the target in steady traffic.

The first holds for the wanted number of gangs. Above the second, more are wanted; in between, the number stays."""
USUAL_START_S = 60.0
"""Seconds from the order of a gang until it takes jobs, before one was seen."""
KEPT_S = 3600.0
"""Age of the oldest arrivals that are kept, at least."""
NUM_STARTS = 8
"""Newest starts whose median counts."""
MIN_WINDOW_S, WINDOW_STARTS = 120.0, 2.0
"""Arrivals are averaged over this many starts of a gang, and at least over this many seconds."""
SPREAD_PARTS = 16
"""Parts of the time of a first gang's start, over which the requests that came meanwhile are spread."""
MIN_SPAN_S = 10.0
"""Arrivals of a shorter time are averaged over this."""
MIN_HOLD_S, HOLD_STARTS = 10.0, 1.0
"""Seconds, at least, and multiples of the longest recent start, for which an unneeded gang stays.

An idle gang that is kept for as long as a start takes costs at most twice the optimum (ski rental). Gandhi et al. 2012,
"AutoScale: Dynamic, Robust Capacity Management for Multi-Tier Data Centers", delay the end of servers likewise.
"""
CLEAR_STARTS = 2.0
"""A backlog is cleared within this many starts of a gang.

Its requests are late by then, so haste is expensive. On a day of sudden rises, 1 start took 2.7 % more GPU-hours than
2, for 0.2 points fewer late requests."""
MAX_CV2 = 3.0
"""Limit of the squared coefficient of variation of job times, which few jobs estimate badly."""
NEWEST_PARTS, SIGNIFICANCE = (1 / 2, 1 / 4, 1 / 8), 4.0
"""The newest part of the window counts alone if it exceeds the mean by this many standard deviations."""
MIN_TREND_S, TREND_STARTS = 900.0, 8.0
"""The trend of arrivals covers this many starts of a gang, and at least this many seconds."""
MIN_WAIT_SHARE = 0.1
"""Deadlines shorten the target wait to no less than this share."""
YIELD_EVERY_S = 10.0
"""Interval at which a model without idle gangs gives one up for a model of higher priority."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRules:
    """Limits and targets of one model. Raise ``ValueError`` if they contradict each other."""

    target_wait_s: float
    """Time that a request may wait for others."""
    min_gangs: int = 1
    """Fewest gangs; 0: the last one ends after ``idle_s``."""
    max_gangs: int = 1
    """Most gangs, however long requests wait."""
    idle_s: float = 300.0
    """Time without work before the last gang ends, if ``min_gangs`` is 0."""
    gangs_per_node: int = 1
    """Gangs for which a node has room. A node costs the same with fewer, so whole nodes are filled."""

    def __post_init__(self) -> None:
        if not self.target_wait_s > 0:
            raise ValueError(f"target_wait_s is {self.target_wait_s:g}: give a positive number of seconds")
        if not 0 <= self.min_gangs <= self.max_gangs or not self.max_gangs:
            raise ValueError(f"min {self.min_gangs} and max {self.max_gangs} gangs: 0 <= min <= max, and max >= 1")
        if self.gangs_per_node < 1:
            raise ValueError(f"gangs_per_node is {self.gangs_per_node}: give a whole number, at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class GangReport:
    """Report of a running gang. Sums count from its start."""

    backlog_s: float = 0.0
    """Predicted seconds until its open jobs are done."""
    num_jobs: int = 0
    """Open jobs, and requests on their way into the gang."""
    num_arrived: float = 0.0
    """Jobs that arrived, refused ones included."""
    arrived_s: float = 0.0
    """Sum of their predicted seconds on the whole gang."""
    arrived_s2: float = 0.0
    """Sum of the squares of these."""
    spare_s: float = math.inf
    """Least time that a recent job could wait and meet its deadline; infinity without deadlines."""
    start_s: float | None = None
    """Time its own start took, without its node's."""
    node: float | None = None
    """Number of the node that Ray Serve counts it to: metrics are numbers. None if unknown."""
    on_head: float = 0.0
    """1 on the head of a Ray cluster."""


UNHEARD = GangReport(num_jobs=1)
"""Stands for the report of a gang that has none, or an old one: it counts as busy, and its sums are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """State of a model's gangs."""

    now_s: float
    """Time by the caller's clock."""
    target: int
    """Current target, gangs that start included."""
    gangs: Mapping[str, GangReport] = field(default_factory=dict)
    """Running gangs by name, the oldest first."""
    num_unassigned: float = 0.0
    """Requests that wait for a first gang."""

    @property
    def num_idle(self) -> int:
        """Number of gangs in a row without jobs, in the order in which Ray Serve 2.60 ends them.

        Gangs on the head end last. The node with the fewest gangs comes first, then the oldest node; on a node, the
        newest gang. It is 0 while the nodes of some are unknown. Serve also counts a node's replicas of other
        deployments, which are not known here. Where these differ, a gang with a job may be among the first.
        """
        nodes: dict[float | None, list[GangReport]] = {}
        for report in self.gangs.values():
            nodes.setdefault(report.node, []).append(report)
        if None in nodes and len(nodes) > 1:
            return 0
        by_node = sorted(nodes.values(), key=lambda gangs: (gangs[0].on_head, len(gangs)))
        ordered = [report for gangs in by_node for report in reversed(gangs)]
        return next((i for i, report in enumerate(ordered) if report.num_jobs), len(ordered))

    @property
    def has_work(self) -> bool:
        return self.num_unassigned > 0 or any(report.num_jobs for report in self.gangs.values())


class ArrivalHistory:
    """Arrivals at all gangs together, as cumulative sums over time.

    Requests that came while the first gang started are reported all at once. They count as spread over the time since
    the last observation without a gang, not as a sudden rise. Arrivals before the first observation do not count:
    Ray Serve's controller may have restarted beside running gangs, whose sums are old.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._sums: list[tuple[float, float, float]] = []
        self._last: dict[str, GangReport | None] = {}
        """Newest report of each gang; None if the gang is older than the first observation and has not reported yet."""
        self._gangs_are_old = True
        """True if all gangs so far may be older than the first observation."""
        self._empty_s: float | None = None
        """Time of the last observation without gangs, until a later gang reports arrivals, or finds none to do."""
        self._begun_s: float | None = None
        """Time of the first observation with a gang since."""

    def hear(self, seen: Observation) -> bool:
        """Add what has arrived since the last observation. Return whether anything has."""
        is_first = not self._times_s
        sums = (0.0, 0.0, 0.0) if is_first else self._sums[-1]
        last = {name: self._last.get(name, None if self._gangs_are_old else GangReport()) for name in seen.gangs}
        self._gangs_are_old &= seen.target > 0 and not seen.gangs
        for name, report in seen.gangs.items():
            if report == UNHEARD:  # what it reported before still counts; Serve copies objects of this module
                continue
            before, last[name] = last[name] or report, report
            if report.num_arrived < before.num_arrived:  # the gang was rebuilt under the same name
                before = GangReport()
            # The difference first: no rounding may make a sum fall.
            sums = (
                sums[0] + max(0.0, report.num_arrived - before.num_arrived),
                sums[1] + max(0.0, report.arrived_s - before.arrived_s),
                sums[2] + max(0.0, report.arrived_s2 - before.arrived_s2),
            )
        self._last = last
        grew = not is_first and sums[0] > self._sums[-1][0]
        if not seen.gangs and not seen.target:
            self._empty_s, self._begun_s = seen.now_s, None
        elif grew and self._empty_s is not None:
            self._spread(max(self._empty_s, self._times_s[0]), seen.now_s, sums)
            self._empty_s = None
        elif seen.gangs and self._begun_s is None:
            self._begun_s = seen.now_s
        elif self._begun_s is not None and seen.now_s - self._begun_s > MIN_SPAN_S and not seen.has_work:
            self._empty_s = None  # the requests for the gang were cancelled
        self._times_s.append(seen.now_s)
        self._sums.append(sums)
        if seen.now_s - self._times_s[0] > 2 * KEPT_S:
            oldest = bisect_left(self._times_s, seen.now_s - KEPT_S)
            del self._times_s[:oldest], self._sums[:oldest]
        return grew

    def between(self, from_s: float, to_s: float) -> tuple[float, float, float]:
        """Return number, seconds and squared seconds of the jobs that arrived in that time."""
        first, last = self._sums_at(from_s), self._sums_at(to_s)
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]

    def span_s(self, now_s: float, window_s: float) -> float:
        """Return the part of the last ``window_s`` that was observed, at least ``MIN_SPAN_S``."""
        return max(MIN_SPAN_S, min(window_s, now_s - self._times_s[0]))

    def _spread(self, from_s: float, to_s: float, sums: tuple[float, float, float]) -> None:
        """Let the sums grow evenly from the observation at ``from_s`` to ``sums`` at ``to_s``."""
        num = bisect_right(self._times_s, from_s)
        del self._times_s[num:], self._sums[num:]
        before = self._sums[-1]
        for share in (part / SPREAD_PARTS for part in range(1, SPREAD_PARTS)):
            num_arrived, work_s, work_s2 = (old + share * (new - old) for old, new in zip(before, sums, strict=True))
            self._times_s.append(from_s + share * (to_s - from_s))
            self._sums.append((num_arrived, work_s, work_s2))

    def _sums_at(self, at_s: float) -> tuple[float, float, float]:
        return self._sums[min(len(self._sums) - 1, bisect_left(self._times_s, at_s))]


class StartTimes:
    """Measured seconds from the order of a gang until it runs, its node's start included.

    Ray Serve orders the first gang itself and asks the policy again once it runs: the order came after the observation
    before that one.
    """

    def __init__(self) -> None:
        self._ordered_s: deque[float] = deque()
        self._took_s: deque[float] = deque(maxlen=NUM_STARTS)
        self._num_running: int | None = None
        self._target = 0
        self._heard_s: float | None = None

    def hear(self, seen: Observation) -> None:
        """Match gangs that have begun to run with the oldest orders."""
        num_running = len(seen.gangs)
        if self._heard_s is None:  # times of their orders are unknown: the controller may have restarted
            self._target = seen.target
        else:
            self.order(self._heard_s, seen.target)
        num_begun = 0 if self._num_running is None else num_running - self._num_running
        for _ in range(num_begun):
            if self._ordered_s:
                self._took_s.append(seen.now_s - self._ordered_s.popleft())
        self._num_running, self._heard_s = num_running, seen.now_s
        while len(self._ordered_s) > max(0, seen.target - num_running):
            self._ordered_s.pop()

    def order(self, now_s: float, target: int) -> None:
        """Record a new target."""
        self._ordered_s.extend([now_s] * max(0, target - self._target))
        self._target = target

    def lead_s(self, reported_s: float | None) -> float:
        """Return the seconds until a gang that is ordered now runs; ``reported_s`` is the start of a gang itself."""
        if self._took_s:
            return median(self._took_s)
        return USUAL_START_S if reported_s is None else reported_s

    def longest_s(self, reported_s: float | None) -> float:
        """Return the longest of the newest starts: that of a gang that needed a node, if nodes come and go."""
        return max(self._took_s) if self._took_s else self.lead_s(reported_s)


class RecentMaximum:
    """The largest of the values of the last seconds, in amortized constant time."""

    def __init__(self) -> None:
        self._falling: deque[tuple[float, int]] = deque()

    def push(self, now_s: float, value: int, keep_s: float) -> int:
        """Add a value. Return the largest that is at most ``keep_s`` old."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now_s, value))
        while now_s - self._falling[0][0] > keep_s:
            self._falling.popleft()
        return self._falling[0][1]


class GangScaler:
    """Chooses the number of gangs of one model.

    It adds gangs at once, if later ones would miss the target wait or deadlines. It removes gangs when the last
    ``hold_s`` needed fewer. A gang with a job stays, unless its ranks are granted to others.
    """

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules
        self._arrivals, self._starts, self._enough = ArrivalHistory(), StartTimes(), RecentMaximum()
        self._busy_s: float | None = None
        self._reported_start_s: float | None = None
        self._yielded_s = -math.inf
        self._is_new = True

    @property
    def rules(self) -> ScalingRules:
        return self._rules

    @property
    def lead_s(self) -> float:
        """Predicted seconds from the order of a gang until it runs."""
        return self._starts.lead_s(self._reported_start_s)

    @property
    def hold_s(self) -> float:
        """Seconds for which a gang that is not needed stays."""
        return max(MIN_HOLD_S, HOLD_STARTS * self._starts.longest_s(self._reported_start_s))

    def decide(self, seen: Observation, granted: int | None = None) -> int:
        """Return the new target. ``granted``: gangs that ``share_ranks`` allows (None: no limit)."""
        want = self.want(seen)
        return self.settle(seen, want, want if granted is None else granted)

    def want(self, seen: Observation) -> int:
        """Record an observation. Return the number of gangs that the model needs, between its limits."""
        self._starts.hear(seen)
        starts_s = [report.start_s for report in seen.gangs.values() if report.start_s is not None]
        self._reported_start_s = max(starts_s, default=self._reported_start_s)
        if self._arrivals.hear(seen) or seen.has_work or (self._is_new and seen.target):
            self._busy_s = seen.now_s
        is_warm = self._busy_s is not None and seen.now_s - self._busy_s < self._rules.idle_s
        least, enough = map(self._within_limits, self._need(seen) if is_warm or seen.has_work else (0, 0))
        if self._is_new:  # nothing is known of the past: no gang goes before ``hold_s``, nor the last before ``idle_s``
            self._is_new = False
            self._enough.push(seen.now_s, self._within_limits(seen.target), self.hold_s)
        held = self._enough.push(seen.now_s, enough, self.hold_s)
        target = self._within_limits(seen.target)
        if target < least:
            return self._whole_nodes(enough)
        return 0 if held <= 1 and not enough else self._whole_nodes(min(target, held))

    def settle(self, seen: Observation, want: int, granted: int) -> int:
        """Return the new target for ``want`` gangs, of which ``granted`` have room. No gang with a job is ended.

        Exception: gangs beyond ``granted`` end one by one. Ray Serve lets a gang finish its jobs.
        """
        target = min(want, granted)
        if target < seen.target:
            keep = min(seen.target, len(seen.gangs) - seen.num_idle)
            if granted < min(want, keep) and seen.now_s - self._yielded_s >= YIELD_EVERY_S:
                self._yielded_s, keep = seen.now_s, keep - 1
            target = max(target, keep)
        self._starts.order(seen.now_s, target)
        return target

    def _whole_nodes(self, num: int) -> int:
        """Return ``num`` gangs and those for which their nodes have room too."""
        per_node = self._rules.gangs_per_node
        return min(self._rules.max_gangs, -(-num // per_node) * per_node)

    def _within_limits(self, num: int) -> int:
        return min(self._rules.max_gangs, max(self._rules.min_gangs, num))

    def _need(self, seen: Observation) -> tuple[int, int]:
        """Return the gangs without which requests would wait too long, and those with which they will not.

        At least 1: there is work, or the last work is too recent for the last gang to end.
        """
        lead_s, now_s, num = self.lead_s, seen.now_s, len(seen.gangs)
        window_s = max(MIN_WINDOW_S, WINDOW_STARTS * lead_s)
        num_arrived, work_s, work_s2 = self._arrivals.between(now_s - window_s, now_s)
        job_s = work_s / num_arrived if num_arrived else 0.0
        cv2 = min(MAX_CV2, max(0.0, work_s2 / num_arrived / job_s**2 - 1)) if job_s else 0.0
        load = self._load(now_s, window_s, lead_s)
        wait_s = self._wait_s(seen)
        backlog_s = sum(report.backlog_s for report in seen.gangs.values()) + seen.num_unassigned * job_s
        # Work left when gangs that are ordered now run. Above half the target wait, it is cleared within the horizon.
        left_s = max(0.0, backlog_s + (load - num) * lead_s)
        horizon_s = max(wait_s, CLEAR_STARTS * lead_s)
        clearing = (load + left_s / horizon_s) / (1 + wait_s / 2 / horizon_s)
        need = max(math.ceil(clearing - 1e-9) if left_s > num * wait_s / 2 else 0, 1)
        if not job_s:
            return need, need
        least, enough = gangs_needed(load, job_s, cv2, wait_s, at_most=self._rules.max_gangs)
        return max(need, least), max(need, enough)

    def _wait_s(self, seen: Observation) -> float:
        """Return the target wait, shortened by deadlines."""
        spare_s = min((report.spare_s for report in seen.gangs.values()), default=math.inf)
        return max(MIN_WAIT_SHARE * self._rules.target_wait_s, min(self._rules.target_wait_s, spare_s))

    def _load(self, now_s: float, window_s: float, lead_s: float) -> float:
        """Return the number of gangs that arrivals will keep busy when a gang ordered now is ready.

        It is the mean over ``window_s`` with the trend of a longer time. If the newest part of the window exceeds that
        by more than Poisson noise, it is the mean of that part.
        """
        _, work_s, work_s2 = self._arrivals.between(now_s - window_s, now_s)
        span_s = self._arrivals.span_s(now_s, window_s)
        load = mean = work_s / span_s
        for part in NEWEST_PARTS:
            part_s = max(MIN_SPAN_S, part * window_s)
            _, newest_s, _ = self._arrivals.between(now_s - part_s, now_s)
            chance_s = SIGNIFICANCE * math.sqrt(work_s2 / span_s * part_s)
            if span_s > part_s and newest_s - mean * part_s > chance_s:
                load = max(load, newest_s / part_s)
        half_s = self._arrivals.span_s(now_s, max(MIN_TREND_S, TREND_STARTS * lead_s)) / 2
        if load > mean or half_s < window_s:
            return load
        _, old_s, _ = self._arrivals.between(now_s - 2 * half_s, now_s - half_s)
        _, new_s, _ = self._arrivals.between(now_s - half_s, now_s)
        return load + max(0.0, new_s - old_s) / half_s**2 * (lead_s + window_s / 2)


def gangs_needed(load: float, job_s: float, cv2: float, wait_s: float, *, at_most: int) -> tuple[int, int]:
    """Return the fewest gangs with which ``ALERT_SHARE``, and ``LATE_SHARE``, of jobs wait longer than ``wait_s``.

    It is Erlang's C formula for ``load`` erlangs. The exponential tail is scaled by the variation ``cv2`` of job times
    (Whitt 1993, "Approximations for the GI/G/m queue").
    """
    blocked, least = 1.0, at_most
    for num in range(1, at_most):
        blocked = load * blocked / (num + load * blocked)
        if num > load:
            waiting = num * blocked / (num - load * (1 - blocked))
            late = waiting * math.exp(-(num - load) * wait_s / (job_s * (1 + cv2) / 2))
            if late <= ALERT_SHARE:
                least = min(least, num)
            if late <= LATE_SHARE:
                return least, num
    return least, at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDemand:
    """Demand of a model for ranks that it shares with others."""

    want: int
    """Gangs that it would have, were it alone."""
    min_gangs: int = 0
    """Gangs that it gets before any model gets more."""
    num_ranks: int = 1
    """Ranks of a gang."""
    priority: float = 1.0
    """Models of a higher one get what they want first."""


def share_ranks(demands: Mapping[str, RankDemand], num_ranks: int) -> dict[str, int]:
    """Return the gangs that each model may have of ``num_ranks`` ranks.

    All models get their minimum first, then those of the highest priority what they want. Models of one priority share
    what is left in proportion to what they want.
    """
    granted = {name: min(demand.want, demand.min_gangs) for name, demand in demands.items()}
    left = num_ranks - sum(granted[name] * demand.num_ranks for name, demand in demands.items())
    for priority in sorted({demand.priority for demand in demands.values()}, reverse=True):
        equals = sorted(name for name, demand in demands.items() if demand.priority == priority)
        left -= _share_equally(equals, demands, granted, max(0, left))
    return granted


def _share_equally(
    names: Sequence[str], demands: Mapping[str, RankDemand], granted: dict[str, int], num_ranks: int
) -> int:
    """Raise ``granted`` of models of one priority within ``num_ranks``. Return the ranks given."""
    missing = {name: demands[name].want - granted[name] for name in names}
    wanted = sum(missing[name] * demands[name].num_ranks for name in names)
    share, given = min(1.0, num_ranks / wanted) if wanted else 0.0, 0
    for name in names:
        more = math.floor(missing[name] * share + 1e-9)
        granted[name] += more
        given += more * demands[name].num_ranks
    while fitting := [
        name for name in names if granted[name] < demands[name].want and given + demands[name].num_ranks <= num_ranks
    ]:
        name = min(fitting, key=lambda one: (granted[one] / demands[one].want, one))
        granted[name] += 1
        given += demands[name].num_ranks
    return given
