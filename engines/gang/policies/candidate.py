"""What a policy knows of a job, and of the gang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.gang.jobs.job import Job

Ranks = tuple[int, ...]
Teams = Mapping[str, Ranks]
"""The ranks that work on each job, by the job's id. Those of two jobs have none in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A job that has steps left, of which ``num_left`` make forwards (in a forecast parts of steps count too).

    ``number`` counts jobs in order. ``step_s`` is what a step of it is predicted to take, in seconds by team size,
    ``fastest_s`` on the team that is fastest, where all steps of the job, those that are done included, take
    ``whole_s``. ``ranks`` work on it now (() while it waits), ``holders`` have its newest state (() before its first
    step). ``due_s`` is when it must be done, by the clock of who calls the scheduler; None: any time. Who ``may_run``
    can be given a team now; for the states of others there is no room yet.
    """

    job: Job
    number: int
    num_left: float
    step_s: Mapping[int, float]
    fastest_s: float
    whole_s: float
    ranks: Ranks = ()
    holders: Ranks = ()
    due_s: float | None = None
    may_run: bool = True

    @property
    def id(self) -> str:
        return self.job.job_id

    @property
    def has_begun(self) -> bool:
        return bool(self.holders)

    def left_s(self, team_size: int) -> float:
        """What all steps that are left take on such a team."""
        return self.num_left * self.step_s[team_size]

    @property
    def shortest_left_s(self) -> float:
        """The same on the team that is fastest."""
        return self.num_left * self.fastest_s

    def useful_size(self, team_size: int) -> int:
        """The size up to ``team_size`` on which a step is fastest: more ranks may take longer."""
        return min((size for size in self.step_s if size <= team_size), key=lambda size: (self.step_s[size], size))


@dataclass(frozen=True, kw_only=True, slots=True)
class GangShape:
    """``num_ranks`` ranks that form teams of ``team_sizes``, the whole gang alone if it is not elastic. A job's state
    goes from rank to rank in ``move_s``."""

    num_ranks: int
    team_sizes: tuple[int, ...]
    move_s: float

    @property
    def ranks(self) -> Ranks:
        return tuple(range(self.num_ranks))

    @property
    def is_elastic(self) -> bool:
        return self.team_sizes != (self.num_ranks,)


def within_room(ordered: Sequence[Candidate], max_running_jobs: int, num_begun: int | None = None) -> list[Candidate]:
    """Return the same; those that have begun (in all ``num_begun``, by default of these) may run, and the most urgent
    others that there is room for."""
    room = max_running_jobs - (sum(one.has_begun for one in ordered) if num_begun is None else num_begun)
    found = []
    for one in ordered:
        may_run = one.has_begun or room > 0
        room -= not one.has_begun
        found.append(one if one.may_run is may_run else replace(one, may_run=may_run))
    return found
