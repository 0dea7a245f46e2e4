"""Earliest deadline first, for deadlines that can still be met; late jobs go last."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.gang.policies.policy import Candidate, GangShape, Teams
from engines.gang.policies.shortest import MAX_OVERTAKEN, Shortest
from engines.gang.policies.teams import quickest_teams

USUAL_STRETCH = 3.0
"""A job without a deadline is due after this multiple of its lone time, from its arrival."""


class Deadline:
    """Earliest deadline first among those that can still be met (EDF; Liu & Layland 1973).

    Late jobs follow by least predicted work left, with the ageing of ``Shortest``. In an elastic gang, teams minimize
    the predicted number of late jobs, then the waits. The smallest team that meets a job's deadline would use up its
    spare time, and more jobs would be late once others arrive (figures: ``docs/scale/policies.md``).
    """

    def __init__(self, max_overtaken: float = MAX_OVERTAKEN) -> None:
        self._late = Shortest(max_overtaken)
        self._soft_due_s: dict[str, float] = {}

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """See ``Policy.order``."""
        old = [one for one in self._late.order(candidates, now_s) if self._late.is_old(one)]
        others = [one for one in candidates if not self._late.is_old(one)]
        in_time = [one for one in others if self._due_s(one, now_s) - now_s >= one.shortest_left_s]
        late = [one for one in others if self._due_s(one, now_s) - now_s < one.shortest_left_s]
        in_time.sort(key=lambda one: (self._due_s(one, now_s), one.number))
        return [*old, *in_time, *self._late.order(late, now_s)]

    def teams(self, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
        """See ``Policy.teams``."""
        limits_s = {one.id: self._due_s(one, now_s) - now_s for one in ordered}
        return quickest_teams(ordered, gang, sum(map(self._late.is_old, ordered)), limits_s)

    def note(self, served: Candidate, gang_s: float, waiting: Sequence[Candidate]) -> bool:
        """See ``Policy.note``."""
        return self._late.note(served, gang_s, waiting)

    def changes_in_s(
        self, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        """See ``Policy.changes_in_s``."""
        spare_s = (self._due_s(one, now_s) - now_s - one.shortest_left_s for one in waiting)
        late_s = min((one_s for one_s in spare_s if one_s >= 0), default=math.inf)
        return min(math.nextafter(late_s, math.inf), self._late.changes_in_s(served, waiting, now_s))

    def forget(self, job_id: str) -> None:
        """See ``Policy.forget``."""
        self._late.forget(job_id)
        self._soft_due_s.pop(job_id, None)

    def _due_s(self, candidate: Candidate, now_s: float) -> float:
        if candidate.due_s is not None:
            return candidate.due_s
        soft_s = now_s + USUAL_STRETCH * candidate.whole_s / candidate.job.priority
        return self._soft_due_s.setdefault(candidate.id, soft_s)
