"""Equal shares for all keys, or shares by their weights: deficit round robin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engines.gang.policies.policy import Candidate, GangShape, Teams
from engines.gang.policies.shortest import Shortest
from engines.gang.policies.teams import quickest_teams

QUANTUM_S = 2.0
"""Gang-seconds of a turn at weight 1: long enough for most pictures, short compared with people's waits."""


class Fair:
    """Keys take turns (Shreedhar & Varghese 1996, "Efficient fair queuing using deficit round-robin").

    A turn is ``quantum_s`` predicted gang-seconds times the key's weight, for any number of its jobs. It may last a
    step too long, which shortens the key's next turn. A key without jobs saves nothing. Jobs of one key are ordered as
    by ``Shortest``.
    """

    def __init__(self, quantum_s: float = QUANTUM_S) -> None:
        self._quantum_s = quantum_s
        self._within = Shortest()
        self._left_s: dict[str, float] = {}
        """Keys in the order of their turns, the current one first, with the time left of each turn (negative: owed)."""
        self._weights: dict[str, float] = {}

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """See ``Policy.order``."""
        self._weights = {one.job.key: one.job.weight for one in candidates}
        current = {key: left_s for key, left_s in self._left_s.items() if key in self._weights}
        self._left_s = current | {key: self._turn_s(key) for key in self._weights if key not in current}
        self._take_turns()
        turns = {key: turn for turn, key in enumerate(self._left_s)}
        return sorted(self._within.order(candidates, now_s), key=lambda one: turns[one.job.key])

    def teams(self, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
        """See ``Policy.teams``."""
        return quickest_teams(ordered, gang)

    def note(self, served: Candidate, gang_s: float, waiting: Sequence[Candidate]) -> bool:
        """See ``Policy.note``."""
        key = served.job.key
        self._left_s[key] -= gang_s
        has_aged = self._within.note(served, gang_s, [one for one in waiting if one.job.key == key])
        return has_aged or self._left_s[key] <= 0

    def changes_in_s(
        self, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        """See ``Policy.changes_in_s``."""
        shares: Counter[str] = Counter()
        for one, share in served:
            shares[one.job.key] += share  # type: ignore[assignment]
        turns_s = [self._left_s[key] / share for key, share in shares.items() if self._left_s[key] > 0]
        return min((min(turns_s, default=0.0), *(self._key_changes_s(key, served, waiting, now_s) for key in shares)))

    def forget(self, job_id: str) -> None:
        """See ``Policy.forget``."""
        self._within.forget(job_id)

    def _key_changes_s(
        self, key: str, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        own = [(one, share) for one, share in served if one.job.key == key]
        return self._within.changes_in_s(own, [one for one in waiting if one.job.key == key], now_s)

    def _take_turns(self) -> None:
        """Rotate past keys with no time left, adding a turn to each."""
        if self._left_s and max(self._left_s.values()) <= 0:  # skip rounds that leave no key any time
            num_rounds = min(-left_s // self._turn_s(key) for key, left_s in self._left_s.items())
            self._left_s = {key: left_s + num_rounds * self._turn_s(key) for key, left_s in self._left_s.items()}
        while self._left_s:
            key = next(iter(self._left_s))
            if self._left_s[key] > 0:
                return
            self._left_s[key] = self._left_s.pop(key) + self._turn_s(key)

    def _turn_s(self, key: str) -> float:
        return self._quantum_s * self._weights[key]
