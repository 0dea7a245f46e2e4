"""A policy of a gang's scheduler: its interface, its input, and the registry of policies by name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol, cast

from engines.gang.jobs.job import Job

Ranks = tuple[int, ...]
Teams = Mapping[str, Ranks]
"""Ranks that work on each job, by job id; disjoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A job with steps left. Times are predicted seconds."""

    job: Job
    """The request; policies read its priority, owner and additions."""
    number: int
    """Its place in order of arrival."""
    num_left: float
    """Steps with forwards that are left (fractions of steps in a simulation)."""
    step_s: Mapping[int, float]
    """Time of one step, by team size."""
    fastest_s: float
    """Time of one step on the fastest team."""
    whole_s: float
    """Time of all steps of the job on the fastest team, done ones included."""
    ranks: Ranks = ()
    """Current team; empty while the job waits."""
    holders: Ranks = ()
    """Ranks with its newest state; empty before its first step."""
    due_s: float | None = None
    """Its deadline by the clock of the scheduler's caller; None: none."""
    may_run: bool = True
    """True if it can get a team now; False if there is no room for its state yet."""
    switch_s: float = 0.0
    """Time to change the weights for its additions; 0 if some rank has them (``GangShape.charged``)."""

    @property
    def id(self) -> str:
        return self.job.job_id

    @property
    def has_begun(self) -> bool:
        return bool(self.holders)

    def left_s(self, team_size: int) -> float:
        """Return the time of all remaining steps on such a team."""
        return self.num_left * self.step_s[team_size]

    @property
    def shortest_left_s(self) -> float:
        """Time of all remaining steps on the fastest team, and of the change of weights before them."""
        return self.switch_s + self.num_left * self.fastest_s

    def useful_size(self, team_size: int) -> int:
        """Return the size up to ``team_size`` with the fastest step: more ranks may take longer."""
        return min((size for size in self.step_s if size <= team_size), key=lambda size: (self.step_s[size], size))


@dataclass(frozen=True, kw_only=True, slots=True)
class GangShape:
    """Ranks and team sizes of a gang (one size if not elastic), and what changes of teams and of weights cost.

    It alone decides which steps wait for a change of weights: for the scheduler, for policies and in simulations.
    """

    num_ranks: int
    """Ranks of the gang, which teams are parts of."""
    team_sizes: tuple[int, ...]
    """Sizes that teams may have; one if the gang is not elastic."""
    move_s: float
    """Seconds of moving a job between ranks."""
    switch_s: float = 0.0
    """Seconds of changing the weights for a job with other additions than the last one."""
    additions: tuple[Hashable, ...] = ()
    """Additions to the weights by rank; () for none on any rank."""

    @property
    def ranks(self) -> Ranks:
        return tuple(range(self.num_ranks))

    @property
    def is_elastic(self) -> bool:
        return self.team_sizes != (self.num_ranks,)

    def switching_s(self, job: Job, ranks: Ranks) -> float:
        """Return the seconds for which a step of ``job`` on ``ranks`` waits for a change of weights; 0 without one."""
        return self.switch_s if any(self.additions_of(rank) != job.additions for rank in ranks) else 0.0

    def switched(self, job: Job, ranks: Ranks) -> GangShape:
        """Return the gang after a step of ``job`` on ``ranks``."""
        if all(self.additions_of(rank) == job.additions for rank in ranks):
            return self
        return replace(
            self, additions=tuple(job.additions if rank in ranks else self.additions_of(rank) for rank in self.ranks)
        )

    def charged(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return ``candidates`` with the time to change the weights, for those whose additions no rank has."""
        present = {self.additions_of(rank) for rank in self.ranks}
        costs_s = ((one, 0.0 if one.job.additions in present else self.switch_s) for one in candidates)
        return [one if one.switch_s == cost_s else replace(one, switch_s=cost_s) for one, cost_s in costs_s]

    def additions_of(self, rank: int) -> Hashable:
        """Return the additions to the weights of a rank."""
        return self.additions[rank] if self.additions else ()


def limit_running(ordered: Sequence[Candidate], max_running_jobs: int, num_begun: int | None = None) -> list[Candidate]:
    """Return ``ordered`` with ``may_run`` for begun jobs (``num_begun`` in all) and for others within the limit."""
    room = max_running_jobs - (sum(one.has_begun for one in ordered) if num_begun is None else num_begun)
    limited = []
    for one in ordered:
        may_run = one.has_begun or room > 0
        room -= not one.has_begun
        limited.append(one if one.may_run is may_run else replace(one, may_run=may_run))
    return limited


class Policy(Protocol):
    """The order and the teams of jobs. Its only state is what ``note`` reports, in predicted seconds."""

    def order(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """Return all of ``candidates`` (in order of arrival), the most urgent first. Ties go to the earlier arrival."""
        ...

    def teams(self, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
        """Return the teams of some of ``ordered`` in an elastic gang. At least one of those that may run gets one."""
        ...

    def note(self, served: Candidate, gang_s: float, waiting: Sequence[Candidate]) -> bool:
        """Record a planned step of ``served``, of ``gang_s`` predicted gang-seconds, while ``waiting`` have no ranks.

        Return whether that may change the order.
        """
        ...

    def changes_in_s(
        self, served: Sequence[tuple[Candidate, float]], waiting: Sequence[Candidate], now_s: float
    ) -> float:
        """Return the seconds until the order may change while ``served`` run on shares of the gang; infinity: never."""
        ...

    def forget(self, job_id: str) -> None:
        """Remove the records of a job that has ended."""
        ...


def teams_of(policy: Policy, ordered: Sequence[Candidate], gang: GangShape, now_s: float) -> Teams:
    """Return the teams of ``ordered``: by ``policy`` if elastic, else the whole gang for the first that may run."""
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
    """Return the import path of the policy of that name. ValueError lists the known names."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def make_policy(name: str) -> Policy:
    """Return a new policy of that name, for one gang. ValueError lists the known names."""
    module, _, class_name = find_policy(name).partition(":")
    return cast(Policy, getattr(import_module(module), class_name)())
