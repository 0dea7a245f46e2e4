"""When jobs will be done if no other comes: what the gang will do, gone through with a copy of its policy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

from engines.gang.policies.candidate import Candidate, GangShape, Ranks, Teams, within_room
from engines.gang.policies.policy import Policy, teams_of

NUM_EXACT = 16
COARSE_SHARE = 1 / 8
"""After so many looks the policy is not asked again before so much of the time until then has passed since it was: what
is far away need not be known to a turn, and thousands of turns are gone through in some dozens of looks."""

NUM_SHARED_OUT = 8
"""After so many ends of jobs an elastic gang is shared out anew, as it really is after each: to compare all ways to do
that takes a millisecond."""

ROUNDING_S = 1e-9
"""Sums of predicted times may differ by so much."""


class Rehearsal:
    """Asks the policy for order and teams as the scheduler does, goes on to the next end of a job, or to where the
    policy says that it would change the order, and tells it of the steps between as of one. Who ends leaves its place
    to the next in order; the first and the last times the policy shares out an elastic gang anew.

    ``candidates`` are in order of arrival. Who has a team in ``teams`` has it at first; without any, the policy is
    asked for the first ones too. The ``policy`` itself stays as it is.
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
        self._policy, self._gang, self._max_running_jobs = deepcopy(policy), gang, max_running_jobs
        self._begin_s = self._now_s = self._looked_s = now_s
        self._seated: dict[str, Candidate] = {}
        self._is_due, self._num_ended, self._num_looks = True, 0, 0
        self._queue = deque(candidates)
        self._look(teams)

    def ends(self) -> Iterator[tuple[str, float]]:
        """Yields each job's id, and in how many seconds from now it is done: the first to end first."""
        while self._seated:
            if (changes_s := self._changes_in_s()) <= ROUNDING_S:
                self._look({})
                changes_s = self._changes_in_s()
            ended = self._go_on(self._lasts_s(changes_s))
            for one in ended:
                yield one.id, self._now_s - self._begin_s
            self._pass_on([one.ranks for one in ended])

    def _look(self, teams: Teams) -> None:
        """Who has no team in ``teams``, if there are any, waits in the policy's order; without any, it says them."""
        candidates = sorted([*self._seated.values(), *self._queue], key=lambda one: one.number)
        ordered = within_room(self._policy.order(candidates, self._now_s), self._max_running_jobs)
        if not teams:
            teams = teams_of(self._policy, ordered, self._gang, self._now_s)
        self._seated = {one.id: _on(one, teams[one.id]) for one in ordered if one.id in teams}
        self._queue = deque(replace(one, ranks=()) if one.ranks else one for one in ordered if one.id not in teams)
        self._looked_s, self._is_due = self._now_s, False
        self._num_looks += 1

    def _changes_in_s(self) -> float:
        """Returns after how long the policy is to be asked again."""
        served = [(one, self._share(one)) for one in self._seated.values()]
        changes_s = 0.0 if self._is_due else self._policy.changes_in_s(served, self._queue, self._now_s)
        if self._num_looks <= NUM_EXACT:
            return changes_s
        return max(changes_s, self._looked_s + COARSE_SHARE * (self._looked_s - self._begin_s) - self._now_s)

    def _lasts_s(self, changes_s: float) -> float:
        """Returns for how long all go on: whole steps of the quickest, and no longer than to the end of one."""
        ends_s = min(map(_left_s, self._seated.values()))
        if changes_s >= ends_s:
            return ends_s
        self._is_due = True
        step_s = min(one.step_s[len(one.ranks)] for one in self._seated.values())
        return min(ends_s, step_s * max(1, math.ceil((changes_s - ROUNDING_S) / step_s)))

    def _go_on(self, by_s: float) -> list[Candidate]:
        """Returns the jobs that end with that."""
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
