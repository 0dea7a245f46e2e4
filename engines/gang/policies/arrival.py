"""First come, first served."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.gang.policies.policy import Candidate, GangShape, Teams
from engines.gang.policies.teams import quickest_teams


class Arrival:
    """Jobs begin in order of arrival. In an elastic gang the first ones share it if that reduces the mean wait."""

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """See ``Policy.order``."""
        return sorted(candidates, key=lambda candidate: candidate.number)

    def teams(self, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
        """See ``Policy.teams``."""
        return quickest_teams(ordered, gang)

    def note(self, served: Candidate, gang_s: float, waiting: Sequence[Candidate]) -> bool:
        """See ``Policy.note``."""
        return False

    def changes_in_s(
        self, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        """See ``Policy.changes_in_s``."""
        return math.inf

    def forget(self, job_id: str) -> None:
        """See ``Policy.forget``."""
