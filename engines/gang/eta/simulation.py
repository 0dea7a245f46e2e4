"""When jobs will be done if no other comes: by a copy of the policy, or roughly, to compare divisions of a gang."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from engines.gang.policies.policy import Candidate, GangShape, Policy, Ranks, Teams, teams_of, within_room

NUM_EXACT = 16
COARSE_SHARE = 1 / 8
"""After ``NUM_EXACT`` questions the policy is asked again only when the simulated time has grown by this share: the far
future need not be exact, and thousands of turns take some dozens of questions."""

NUM_SHARED_OUT = 8
"""The first ends of jobs after which an elastic gang is divided again, as it really is after each. Each time takes a
millisecond."""

ROUNDING_S = 1e-9
"""Tolerance of sums of predicted times."""


class Simulation:
    """Asks the policy for order and teams as the scheduler does, and reports the steps up to the next change as one.

    A change is the end of a job, or when the policy says that it would change the order. A job that ends leaves its
    ranks to the next in order; the first and the last times the policy divides an elastic gang again.
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
        """``candidates`` are in order of arrival, and begin on their ``teams``; without any, the policy chooses them.

        The ``policy`` itself stays as it is.
        """
        self._policy, self._gang, self._max_running_jobs = deepcopy(policy), gang, max_running_jobs
        self._begin_s = self._now_s = self._looked_s = now_s
        self._seated: dict[str, Candidate] = {}
        self._is_due, self._num_ended, self._num_looks = True, 0, 0
        self._queue = deque(candidates)
        self._look(teams)

    def ends(self) -> Iterator[tuple[str, float]]:
        """Yield each job's id and the seconds until it is done, in order of completion."""
        while self._seated:
            if (changes_s := self._changes_in_s()) <= ROUNDING_S:
                self._look({})
                changes_s = self._changes_in_s()
            ended = self._go_on(self._lasts_s(changes_s))
            for one in ended:
                yield one.id, self._now_s - self._begin_s
            self._pass_on([one.ranks for one in ended])

    def _look(self, teams: Teams) -> None:
        """Let jobs without a team in ``teams`` wait in the policy's order. Without any, the policy chooses them."""
        candidates = sorted([*self._seated.values(), *self._queue], key=lambda one: one.number)
        ordered = within_room(self._policy.order(candidates, self._now_s), self._max_running_jobs)
        if not teams:
            teams = teams_of(self._policy, ordered, self._gang, self._now_s)
        self._seated = {one.id: _on(one, teams[one.id]) for one in ordered if one.id in teams}
        self._queue = deque(replace(one, ranks=()) if one.ranks else one for one in ordered if one.id not in teams)
        self._looked_s, self._is_due = self._now_s, False
        self._num_looks += 1

    def _changes_in_s(self) -> float:
        """Return after how long the policy is to be asked again."""
        served = [(one, self._share(one)) for one in self._seated.values()]
        changes_s = 0.0 if self._is_due else self._policy.changes_in_s(served, self._queue, self._now_s)
        if self._num_looks <= NUM_EXACT:
            return changes_s
        return max(changes_s, self._looked_s + COARSE_SHARE * (self._looked_s - self._begin_s) - self._now_s)

    def _lasts_s(self, changes_s: float) -> float:
        """Return for how long all go on: whole steps of the quickest, at most to the first end of a job."""
        ends_s = min(map(_left_s, self._seated.values()))
        if changes_s >= ends_s:
            return ends_s
        self._is_due = True
        step_s = min(one.step_s[len(one.ranks)] for one in self._seated.values())
        return min(ends_s, step_s * max(1, math.ceil((changes_s - ROUNDING_S) / step_s)))

    def _go_on(self, by_s: float) -> list[Candidate]:
        """Return the jobs that end with that."""
        ended = []
        self._now_s += by_s
        for one in list(self._seated.values()):
            if self._policy.note(one, by_s * self._share(one), self._queue):
                self._is_due = True
            if _left_s(one) - by_s <= ROUNDING_S:
                ended.append(self._seated.pop(one.id))
                self._policy.forget(one.id)
            else:
                num_left = one.num_left - by_s / one.step_s[len(one.ranks)]
                self._seated[one.id] = replace(one, num_left=num_left)
        return ended

    def _pass_on(self, places: Sequence[Ranks]) -> None:
        self._num_ended += len(places)
        shares_out = self._num_ended <= NUM_SHARED_OUT or len(self._queue) < len(places)
        if places and self._gang.is_elastic and shares_out:
            self._look({})
            return
        for ranks in places[: len(self._queue)]:
            one = self._queue.popleft()
            self._seated[one.id] = _on(one, ranks[: one.useful_size(len(ranks))])

    def _share(self, one: Candidate) -> float:
        return len(one.ranks) / self._gang.num_ranks


def _left_s(one: Candidate) -> float:
    return one.left_s(len(one.ranks))


def _on(one: Candidate, ranks: Ranks) -> Candidate:
    return one if one.ranks == ranks and one.has_begun else replace(one, ranks=ranks, holders=ranks)


@dataclass(slots=True)
class _Running:
    candidate: Candidate
    team_size: int
    num_left: float

    @property
    def left_s(self) -> float:
        return self.num_left * self.candidate.step_s[self.team_size]

    def go_on(self, by_s: float) -> None:
        self.num_left -= by_s / self.candidate.step_s[self.team_size]


def finish_times_s(
    seated: Iterable[tuple[Candidate, int]], waiting: Sequence[Candidate], gang: GangShape
) -> dict[str, float]:
    """Return the seconds until each job is done, by its id, without asking a policy.

    ``seated`` run now, each on a team of that size; ``waiting`` get the teams that become free, in their order. When
    none waits, the jobs that are left share the gang evenly, if that makes their teams larger.
    """
    running = [_Running(candidate, size, candidate.num_left) for candidate, size in seated]
    queue, times_s, now_s = deque(waiting), {}, 0.0
    while running:
        first = min(running, key=lambda one: one.left_s)
        by_s = first.left_s
        now_s += by_s
        for one in running:
            one.go_on(by_s)
        running.remove(first)
        times_s[first.candidate.id] = now_s
        if queue:
            candidate = queue.popleft()
            running.append(_Running(candidate, candidate.useful_size(first.team_size), candidate.num_left))
        elif running:
            _widen(running, gang)
    return times_s


def _widen(running: Sequence[_Running], gang: GangShape) -> None:
    share = gang.num_ranks // len(running)
    size = max((size for size in gang.team_sizes if size <= share), default=min(gang.team_sizes))
    for one in running:
        one.team_size = one.candidate.useful_size(max(size, one.team_size))
