"""Least remaining predicted work first, with ageing so that no job is overtaken for ever."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from engines.gang.policies.policy import Candidate, GangShape, Teams
from engines.gang.policies.teams import quickest_teams

MAX_OVERTAKEN = 6.0
"""Limit of overtaking, as a multiple of a job's lone time."""


class Shortest:
    """The job with the least predicted work left goes first, from step to step.

    This is SRPT, with the least mean latency on one server (Schrage 1968, "A proof of the optimality of the shortest
    remaining processing time discipline"). A job of priority p counts as if it took 1/p of its time, for order and
    ageing.

    Ageing: a job that later ones have overtaken for ``max_overtaken`` / p times its lone time goes before all later
    ones. So later jobs delay it by at most that many gang-seconds, plus the step in which the limit is reached. There
    is one exception. If the job has not begun by then, and the gang holds its maximum of jobs, later jobs that have
    begun continue until there is room. Beyond that it waits only for earlier jobs.
    """

    def __init__(self, max_overtaken: float = MAX_OVERTAKEN) -> None:
        self._max_overtaken = max_overtaken
        self._overtaken_s: defaultdict[str, float] = defaultdict(float)

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """See ``Policy.order``."""
        return sorted(candidates, key=self._urgency)

    def teams(self, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
        """See ``Policy.teams``."""
        return quickest_teams(ordered, gang, sum(map(self.is_old, ordered)))

    def note(self, served: Candidate, gang_s: float, waiting: Sequence[Candidate]) -> bool:
        """See ``Policy.note``."""
        num_old = 0
        for candidate in waiting:
            if candidate.number < served.number and not self.is_old(candidate):
                self._overtaken_s[candidate.id] += gang_s
                num_old += self.is_old(candidate)
        return num_old > 0

    def changes_in_s(
        self, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        """See ``Policy.changes_in_s``."""
        newest = max(one.number for one, _ in served)
        young = [one for one in waiting if one.number < newest and not self.is_old(one)]
        ages_s = ((self._limit_s(one) - self.overtaken_s(one.id)) / _share_of_later(served, one) for one in young)
        return min(ages_s, default=math.inf)

    def forget(self, job_id: str) -> None:
        """See ``Policy.forget``."""
        self._overtaken_s.pop(job_id, None)

    def overtaken_s(self, job_id: str) -> float:
        """Return the gang-seconds in which later jobs were served before this one."""
        return self._overtaken_s.get(job_id, 0.0)

    def _urgency(self, candidate: Candidate) -> tuple[int, float, int]:
        if self.is_old(candidate):
            return 0, 0.0, candidate.number
        return 1, candidate.shortest_left_s / candidate.job.priority, candidate.number

    def is_old(self, candidate: Candidate) -> bool:
        """Return whether it goes before all later jobs."""
        return self.overtaken_s(candidate.id) >= self._limit_s(candidate)

    def _limit_s(self, candidate: Candidate) -> float:
        return self._max_overtaken * candidate.whole_s / candidate.job.priority


def _share_of_later(served: Sequence[tuple[Candidate, float]], candidate: Candidate) -> float:
    return sum(share for one, share in served if one.number > candidate.number)
