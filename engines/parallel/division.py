"""How a gang divides steps: which teams it may form, and which forwards of a step each of their members makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import JobFailedError
from engines.core.model import Branch
from engines.core.shard_plan import ShardPlan
from engines.core.spec import ParallelSpec
from engines.parallel.collectives import Axis, all_gather, num_started
from engines.parallel.mesh import Groups, Team, Teams


def exchange_predictions(mine: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Every branch's prediction, in branch order, given my part's; mine alone on an axis of size 1."""
    return (mine,) if axis.size == 1 else all_gather(mine, axis).unbind(0)


def may_pair(one: Branch, other: Branch, plan: ShardPlan) -> bool:
    """Whether two branches give predictions of one shape.

    Streams that are cut but never gathered (the text of a joint attention) may differ in length, and what the plan
    calls free in anything; nothing else may.
    """
    return _shapes(one, plan) == _shapes(other, plan)


def _shapes(branch: Branch, plan: ShardPlan) -> dict[str, Any]:
    """The constants, and the shapes of the inputs."""
    gathered = {gather.stream for gather in plan.gathers}
    inner = {shard.key for shard in plan.shards if shard.module == "" and shard.stream not in gathered}
    known = {**branch.constants, **{name: tuple(x.shape) for name, x in branch.inputs.items()}}
    return {name: value for name, value in known.items() if name not in inner and name not in plan.free}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamSpecs:
    """How teams divide a step, by their size: ``by_size[size][n - 1]`` is for n branches of one shape at once."""

    by_size: Mapping[int, tuple[ParallelSpec, ...]]

    @classmethod
    def of_sizes(cls, sizes: Iterable[int], divide: Callable[[int], tuple[ParallelSpec, ...]]) -> TeamSpecs:
        """What ``divide`` gives for each of ``sizes``, of which the last is the whole gang's.

        Smaller teams are a convenience: a size for which ``divide`` raises ValueError is left out, but not the last.
        """
        *smaller, whole = sizes
        by_size = {size: specs for size in smaller if (specs := _or_none(divide, size))}
        return cls(by_size={**by_size, whole: divide(whole)})

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.by_size)

    def of(self, size: int) -> tuple[ParallelSpec, ...]:
        """The divisions of one branch, of two at once, and so on. ValueError lists the sizes that there are."""
        if size not in self.by_size:
            allowed = ", ".join(map(str, self.by_size))
            raise ValueError(f"this gang cannot divide a step over {size} ranks; allowed: {allowed}")
        return self.by_size[size]

    def every(self) -> tuple[ParallelSpec, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.by_size.values())))


class Division:
    """The teams of a gang with one model. Made on every rank at the same time (it makes process groups).

    ``others`` are further divisions for which teams are formed, to be used in the place of ``specs``.
    """

    def __init__(
        self,
        specs: TeamSpecs,
        plan: ShardPlan,
        *,
        rank: int,
        num_ranks: int,
        groups: Groups,
        others: Iterable[ParallelSpec] = (),
    ) -> None:
        self.specs = specs
        self._formed = frozenset((*specs.every(), *others))
        self.teams = Teams(rank=rank, num_ranks=num_ranks, specs=self._formed, groups=groups)
        self._plan = plan

    def knows(self, specs: TeamSpecs) -> bool:
        """Whether there are teams for all of these divisions."""
        return self._formed.issuperset(specs.every())

    def use(self, specs: TeamSpecs) -> None:
        """Divide so from now on. All ranks make the call between the same two steps."""
        assert self.knows(specs), "teams are formed at start"
        self.specs = specs

    def teams_in_use(self) -> tuple[Team, ...]:
        """The caller's teams, narrow ones first, without those for divisions that others replaced."""
        used = self.specs.every()
        return tuple(team for team in self.teams.all() if team.spec in used)

    @property
    def team_sizes(self) -> tuple[int, ...]:
        """How many ranks may work on a step together, in ascending order."""
        return self.specs.sizes

    def team(self, ranks: tuple[int, ...], num_branches: int = 1) -> Team:
        """How ``ranks`` divide so many branches of one shape at once. ValueError if they cannot form a team."""
        return self.teams.team(ranks, self.specs.of(len(ranks))[num_branches - 1])

    @property
    def at_once(self) -> int:
        """The most branches that any of the caller's teams runs at the same time."""
        return max(team.guidance.size for team in self.teams_in_use())

    def checked_teams(self) -> tuple[Team, ...]:
        """The caller's teams of more than one rank, as they divide all the branches that they can, small ones first."""
        members = dict.fromkeys(team.ranks for team in self.teams_in_use() if len(team.ranks) > 1)
        return tuple(self.team(ranks, len(self.specs.of(len(ranks)))) for ranks in members)

    def forwards(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> Iterator[tuple[Branch, Team]]:
        """The caller's forwards, in order: a branch on the whole team, or its part of it of those that go together."""
        while branches:
            number = self._num_together(branches, ranks)
            team = self.team(ranks, number)
            yield branches[team.guidance.index], team
            branches = branches[number:]

    def predict(
        self, branches: tuple[Branch, ...], ranks: tuple[int, ...], forward: Callable[[Branch, Team], Tensor]
    ) -> tuple[Tensor, ...]:
        """One prediction per branch, equal on all of ``ranks``: what ``forward`` makes here, exchanged with others."""
        exchanged = (
            exchange_predictions(forward(branch, team), team.guidance)
            for branch, team in self.forwards(branches, ranks)
        )
        return tuple(itertools.chain.from_iterable(exchanged))

    def _num_together(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> int:
        """How many of the next branches run at the same time, each on a part of the team."""
        for number in range(len(self.specs.of(len(ranks))), 1, -1):
            together = branches[:number]
            enough = len(together) == self.team(ranks, number).guidance.size == number
            if enough and all(may_pair(together[0], other, self._plan) for other in together[1:]):
                return number
        return 1


def shape_of(branch: Branch) -> Hashable:
    """What tells branches apart that need steps of their own: the module, its constants, and shapes and dtypes of its
    inputs."""
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in sorted(branch.inputs.items()))
    return branch.module, repr(sorted(branch.constants.items())), shapes


def _or_none(divide: Callable[[int], tuple[ParallelSpec, ...]], size: int) -> tuple[ParallelSpec, ...] | None:
    try:
        return divide(size)
    except ValueError:
        return None


RANKS_AT_FAULT = (torch.AcceleratorError, torch.OutOfMemoryError, dist.DistError, MemoryError)
"""What devices and communicators raise: no other job of the gang can go on after it."""


@contextmanager
def forward_fails_alone() -> Iterator[None]:
    """Raise ``JobFailedError`` for what fails inside before anything was exchanged: shapes, dtypes, missing inputs.

    All ranks compute the same, so all of them fail alike, and their communicator is as it was. A ``ValueError`` stays
    one, and so does whatever comes after an exchange, or from a device.
    """
    before = num_started()
    try:
        yield
    except (ValueError, *RANKS_AT_FAULT):
        raise
    except Exception as error:
        if num_started() != before:
            raise
        raise JobFailedError(f"the model's forward fails: {type(error).__name__}: {error}") from error
