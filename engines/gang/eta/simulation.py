"""Simulated completion of jobs without further arrivals: with a copy of the policy, or by a rough rule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from engines.gang.policies.policy import Candidate, GangShape, Policy, Ranks, Teams, limit_running, teams_of

NUM_EXACT = 16
COARSE_SHARE = 1 / 8
"""After ``NUM_EXACT`` calls the policy is asked again only when the simulated time has grown by this fraction. The
far future may be inexact, and thousands of turns take some dozens of calls."""

NUM_REDIVIDED = 8
"""Job ends that re-divide an elastic gang. The scheduler re-divides at each end; each division takes a millisecond."""

ROUNDING_S = 1e-9
"""Tolerance of sums of predicted times."""


class Simulation:
    """Asks the policy for order and teams like the scheduler, and advances all steps up to the next change at once.

    A change is the end of a job, or a change of order by the policy. The next job in order gets the ranks of an ended
    job. At the first and the last ends, the policy divides an elastic gang again.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        policy: Policy,
        gang: GangShape,
        max_running_jobs: int,
        now_s: float,
        teams: Teams,
    ) -> None:
        """Begin with ``candidates`` in order of arrival. ``teams``: current teams by job; {} lets the policy assign.

        The given ``policy`` is not changed.
        """
        self._policy, self._gang, self._max_running_jobs = deepcopy(policy), gang, max_running_jobs
        self._begin_s = self._now_s = self._asked_s = now_s
        self._running: dict[str, Candidate] = {}
        self._must_ask_policy, self._num_ended, self._num_asked = True, 0, 0
        self._queue = deque(candidates)
        self._ask_policy(teams)

    def ends(self) -> Iterator[tuple[str, float]]:
        """Yield each job's id and the seconds until it is done, in order of completion."""
        while self._running:
            if (changes_s := self._changes_in_s()) <= ROUNDING_S:
                self._ask_policy({})
                changes_s = self._changes_in_s()
            ended = self._advance(self._phase_s(changes_s, self._switch()))
            for one in ended:
                yield one.id, self._now_s - self._begin_s
            self._reassign([one.ranks for one in ended])

    def _ask_policy(self, teams: Teams) -> None:
        """Queue jobs without a team in ``teams`` in policy order. If ``teams`` is empty, the policy assigns teams."""
        candidates = sorted([*self._running.values(), *self._queue], key=lambda one: one.number)
        ordered = self._policy.order(self._gang.charged(candidates), self._now_s)
        ordered = limit_running(ordered, self._max_running_jobs)
        if not teams:
            teams = teams_of(self._policy, ordered, self._gang, self._now_s)
        self._running = {one.id: _on_ranks(one, teams[one.id]) for one in ordered if one.id in teams}
        self._queue = deque(replace(one, ranks=()) if one.ranks else one for one in ordered if one.id not in teams)
        self._asked_s, self._must_ask_policy = self._now_s, False
        self._num_asked += 1

    def _changes_in_s(self) -> float:
        """Return the time until the policy must be asked again."""
        served = [(one, self._share(one)) for one in self._running.values()]
        changes_s = 0.0 if self._must_ask_policy else self._policy.changes_in_s(served, self._queue, self._now_s)
        if self._num_asked <= NUM_EXACT:
            return changes_s
        return max(changes_s, self._asked_s + COARSE_SHARE * (self._asked_s - self._begin_s) - self._now_s)

    def _switch(self) -> dict[str, float]:
        """Change the weights of ranks for the jobs that now run on them, which counts as steps of these jobs.

        Jobs with these additions may go before others then. Return the seconds by job.
        """
        before, switches_s = self._gang, {}
        for one in list(self._running.values()):
            if switch_s := self._gang.switching_s(one.job, one.ranks):
                num_left = one.num_left + switch_s / one.step_s[len(one.ranks)]
                self._running[one.id] = replace(one, num_left=num_left)
                switches_s[one.id] = switch_s
            self._gang = self._gang.switched(one.job, one.ranks)
        self._must_ask_policy |= self._gang is not before and bool(self._queue)
        return switches_s

    def _phase_s(self, changes_s: float, switches_s: Mapping[str, float]) -> float:
        """Return the seconds to the next change, in whole steps of the fastest job, at most to a job's end.

        A step follows each change of weights (``switches_s`` by job).
        """
        ends_s = min(map(_left_s, self._running.values()))
        if changes_s >= ends_s:
            return ends_s
        self._must_ask_policy = True
        step_s, begun_s, least = min(_next_step_s(one, switches_s.get(one.id, 0.0)) for one in self._running.values())
        return min(ends_s, begun_s + step_s * max(least, math.ceil((changes_s - begun_s - ROUNDING_S) / step_s)))

    def _advance(self, by_s: float) -> list[Candidate]:
        """Advance all running jobs by ``by_s``; return those that end."""
        ended = []
        self._now_s += by_s
        for one in list(self._running.values()):
            if self._policy.note(one, by_s * self._share(one), self._queue):
                self._must_ask_policy = True
            if _left_s(one) - by_s <= ROUNDING_S:
                ended.append(self._running.pop(one.id))
                self._policy.forget(one.id)
            else:
                num_left = one.num_left - by_s / one.step_s[len(one.ranks)]
                self._running[one.id] = replace(one, num_left=num_left)
        return ended

    def _reassign(self, places: Sequence[Ranks]) -> None:
        self._num_ended += len(places)
        divides_again = self._num_ended <= NUM_REDIVIDED or len(self._queue) < len(places)
        if places and self._gang.is_elastic and divides_again:
            self._ask_policy({})
            return
        for ranks in places[: len(self._queue)]:
            one = self._queue.popleft()
            self._running[one.id] = _on_ranks(one, ranks[: one.useful_size(len(ranks))])

    def _share(self, one: Candidate) -> float:
        return len(one.ranks) / self._gang.num_ranks


def _left_s(one: Candidate) -> float:
    return one.left_s(len(one.ranks))


def _next_step_s(one: Candidate, switch_s: float) -> tuple[float, float, int]:
    """Return the seconds of a step, the seconds before the next one begins, and how many must follow these.

    The seconds before are what is left of a step that has begun, or of a change of weights.
    """
    step_s = one.step_s[len(one.ranks)]
    num_left = one.num_left - switch_s / step_s
    begun_s = (num_left - math.floor(num_left + ROUNDING_S)) * step_s
    return step_s, begun_s + switch_s, 0 if begun_s > ROUNDING_S and not switch_s else 1


def _on_ranks(one: Candidate, ranks: Ranks) -> Candidate:
    return one if one.ranks == ranks and one.has_begun else replace(one, ranks=ranks, holders=ranks)


@dataclass(slots=True)
class _TeamJob:
    """A job that runs on a team."""

    candidate: Candidate
    """The job."""
    team_size: int
    """Ranks of the team."""
    num_left: float
    """Steps left, in fractions."""

    @property
    def left_s(self) -> float:
        return self.num_left * self.candidate.step_s[self.team_size]

    def advance(self, by_s: float) -> None:
        self.num_left -= by_s / self.candidate.step_s[self.team_size]


def finish_times_s(
    placed: Iterable[tuple[Candidate, int]], waiting: Sequence[Candidate], gang: GangShape, teams: Teams
) -> dict[str, float]:
    """Return the seconds until each job is done, by its id, without asking a policy.

    ``placed`` jobs run now, each on a team of that size (``teams`` has its ranks); ``waiting`` ones get the teams that
    become free, in order. When none waits, the remaining jobs share the gang evenly, if that makes their teams larger.
    """
    running = [
        _team_job(candidate, size, gang.switching_s(candidate.job, teams[candidate.id])) for candidate, size in placed
    ]
    queue, times_s, now_s = deque(waiting), {}, 0.0
    while running:
        first = min(running, key=lambda one: one.left_s)
        by_s = first.left_s
        now_s += by_s
        for one in running:
            one.advance(by_s)
        running.remove(first)
        times_s[first.candidate.id] = now_s
        if queue:
            candidate = queue.popleft()
            changes = candidate.job.additions != first.candidate.job.additions
            size = candidate.useful_size(first.team_size)
            running.append(_team_job(candidate, size, gang.switch_s if changes else 0.0))
        elif running:
            _widen(running, gang)
    return times_s


def _team_job(candidate: Candidate, team_size: int, switch_s: float) -> _TeamJob:
    num_left = candidate.num_left + (switch_s / candidate.step_s[team_size] if switch_s else 0.0)
    return _TeamJob(candidate, team_size, num_left)


def _widen(running: Sequence[_TeamJob], gang: GangShape) -> None:
    share = gang.num_ranks // len(running)
    size = max((size for size in gang.team_sizes if size <= share), default=min(gang.team_sizes))
    for one in running:
        one.team_size = one.candidate.useful_size(max(size, one.team_size))
