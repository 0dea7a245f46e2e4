"""A policy of a gang's scheduler: its interface, its input, and the registry of policies by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol, cast

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


POLICIES = {
    "shortest": "engines.gang.policies.shortest:Shortest",
    "deadline": "engines.gang.policies.deadline:Deadline",
    "fair": "engines.gang.policies.fair:Fair",
    "arrival": "engines.gang.policies.arrival:Arrival",
}


def find_policy(name: str) -> str:
    """Return where the policy of that name is. ValueError lists the known names."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def make_policy(name: str) -> Policy:
    """Return a new policy of that name, for one gang. ValueError lists the known names."""
    module, _, class_name = find_policy(name).partition(":")
    return cast(Policy, getattr(import_module(module), class_name)())
