"""What a scheduler asks of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engines.gang.policies.candidate import Candidate, GangShape, Teams


class Policy(Protocol):
    """Who goes first. It may keep what it was told of the plans (``note``), in predicted seconds, and nothing else."""

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """Return all of ``candidates`` (in order of arrival), the most urgent first. Ties go to who came first."""
        ...

    def teams(self, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
        """Return the teams of some of ``ordered`` in an elastic gang. At least one of those that may run gets one."""
        ...

    def note(self, served: Candidate, gang_s: float, waiting: Sequence[Candidate]) -> bool:
        """Hear of a step of ``served``, of so many predicted gang-seconds, while no rank works on ``waiting``.

        Returns whether that may change the order.
        """
        ...

    def changes_in_s(
        self, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        """Return in how many seconds the order may be another, while ranks work on ``served``, each by such a share of
        the gang, and on none of ``waiting``; infinity if that takes the end of a job, or a new one."""
        ...

    def forget(self, job_id: str) -> None:
        """Hear that a job has ended."""
        ...


def teams_of(policy: Policy, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
    """Return the teams of ``ordered``: those of ``policy`` in an elastic gang, else the whole gang for the first that
    may run; none if none may."""
    first = next((one for one in ordered if one.may_run), None)
    if first is None:
        return {}
    return policy.teams(ordered, gang, now_s) if gang.is_elastic else {first.id: gang.ranks}
