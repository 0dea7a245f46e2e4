"""Division of steps in a gang: its possible teams, and the forwards of each member of a team."""

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


def exchange_predictions(prediction: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Return every branch's prediction, in branch order, from this rank's ``prediction``."""
    return (prediction,) if axis.size == 1 else all_gather(prediction, axis).unbind(0)


def may_pair(one: Branch, other: Branch, plan: ShardPlan) -> bool:
    """Return whether two branches give predictions of one shape.

    Streams that are cut but never gathered (the text of a joint attention) may differ in length, ``free`` inputs in any
    way. All others must match.
    """
    return _shapes(one, plan) == _shapes(other, plan)


def _shapes(branch: Branch, plan: ShardPlan) -> dict[str, Any]:
    """Return the constants, and the shapes of the inputs, that must match."""
    gathered = {gather.stream for gather in plan.gathers}
    inner = {shard.key for shard in plan.shards if shard.module == "" and shard.stream not in gathered}
    values = {**branch.constants, **{name: tuple(x.shape) for name, x in branch.inputs.items()}}
    return {name: value for name, value in values.items() if name not in inner and name not in plan.free}


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamSpecs:
    """How teams of each size divide a step."""

    by_size: Mapping[int, tuple[ParallelSpec, ...]]
    """``by_size[size][n - 1]`` is the division of n branches of one shape at once."""

    @classmethod
    def of_sizes(cls, sizes: Iterable[int], divide: Callable[[int], tuple[ParallelSpec, ...]]) -> TeamSpecs:
        """Return the divisions that ``divide`` gives for each of ``sizes``; the last one is the whole gang's.

        Smaller teams are optional: a size for which ``divide`` raises ValueError is skipped, except the last.
        """
        *smaller, whole = sizes
        by_size = {size: specs for size in smaller if (specs := _divide_or_none(divide, size))}
        return cls(by_size={**by_size, whole: divide(whole)})

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.by_size)

    def of(self, size: int) -> tuple[ParallelSpec, ...]:
        """Return the divisions of one branch, of two at once, and so on. ValueError lists the allowed sizes."""
        if size not in self.by_size:
            allowed = ", ".join(map(str, self.by_size))
            raise ValueError(f"this gang cannot divide a step over {size} ranks; allowed: {allowed}")
        return self.by_size[size]

    def every(self) -> tuple[ParallelSpec, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.by_size.values())))


class Division:
    """The teams of a gang with one model. All ranks construct it at the same time, because it makes process groups.

    ``others`` are further divisions to form teams for; ``use`` may switch to them later.
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
        self._formed_specs = frozenset((*specs.every(), *others))
        self.teams = Teams(rank=rank, num_ranks=num_ranks, specs=self._formed_specs, groups=groups)
        self._plan = plan

    def has_teams_for(self, specs: TeamSpecs) -> bool:
        """Return whether teams were formed for all of these divisions."""
        return self._formed_specs.issuperset(specs.every())

    def use(self, specs: TeamSpecs) -> None:
        """Switch to ``specs``. All ranks must make the call between the same two steps."""
        assert self.has_teams_for(specs), "teams are formed at start"
        self.specs = specs

    def teams_in_use(self) -> tuple[Team, ...]:
        """Return the caller's teams for the current divisions, small ones first."""
        used = self.specs.every()
        return tuple(team for team in self.teams.all() if team.spec in used)

    @property
    def team_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that may work on a step together, in ascending order."""
        return self.specs.sizes

    def team(self, ranks: tuple[int, ...], num_branches: int = 1) -> Team:
        """Return the team of ``ranks`` for ``num_branches`` branches of one shape. ValueError if there is none."""
        return self.teams.team(ranks, self.specs.of(len(ranks))[num_branches - 1])

    @property
    def at_once(self) -> int:
        """The most branches that any of the caller's teams runs at the same time."""
        return max(team.guidance.size for team in self.teams_in_use())

    def checked_teams(self) -> tuple[Team, ...]:
        """Return the caller's teams of several ranks, small ones first, each with its largest number of branches."""
        members = dict.fromkeys(team.ranks for team in self.teams_in_use() if len(team.ranks) > 1)
        return tuple(self.team(ranks, len(self.specs.of(len(ranks)))) for ranks in members)

    def forwards(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> Iterator[tuple[Branch, Team]]:
        """Yield the caller's forwards in order: a branch with the team, or the part of a team, that runs it."""
        return ((together[team.guidance.index], team) for together, team in self.groups(branches, ranks))

    def groups(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> Iterator[tuple[tuple[Branch, ...], Team]]:
        """Yield the branches that run at the same time, with their team; equal on all of ``ranks``."""
        while branches:
            number = self._num_together(branches, ranks)
            yield branches[:number], self.team(ranks, number)
            branches = branches[number:]

    def predict(
        self, branches: tuple[Branch, ...], ranks: tuple[int, ...], forward: Callable[[Branch, Team], Tensor]
    ) -> tuple[Tensor, ...]:
        """Return one prediction per branch, equal on all of ``ranks``: the results of ``forward``, exchanged."""
        exchanged = (
            exchange_predictions(forward(branch, team), team.guidance)
            for branch, team in self.forwards(branches, ranks)
        )
        return tuple(itertools.chain.from_iterable(exchanged))

    def _num_together(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> int:
        """Return how many of the next branches run at the same time, each on a part of the team."""
        for number in range(len(self.specs.of(len(ranks))), 1, -1):
            together = branches[:number]
            fills_team = len(together) == self.team(ranks, number).guidance.size == number
            if fills_team and all(may_pair(together[0], other, self._plan) for other in together[1:]):
                return number
        return 1


def shape_of(branch: Branch) -> Hashable:
    """Return a key of branches that share a captured step: module, attention, constants, shapes, dtypes of inputs."""
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in sorted(branch.inputs.items()))
    return branch.module, branch.attention, repr(sorted(branch.constants.items())), shapes


def _divide_or_none(divide: Callable[[int], tuple[ParallelSpec, ...]], size: int) -> tuple[ParallelSpec, ...] | None:
    try:
        return divide(size)
    except ValueError:
        return None


RANKS_AT_FAULT = (torch.AcceleratorError, torch.OutOfMemoryError, dist.DistError, MemoryError)
"""Errors of devices and communicators, after which no job of the gang can continue."""


@contextmanager
def forward_fails_alone() -> Iterator[None]:
    """Raise ``JobFailedError`` if the block fails before any exchange: shapes, dtypes, missing inputs.

    All ranks compute the same, so all fail alike and their communicator stays intact. ``ValueError``, device errors and
    errors after an exchange pass through unchanged.
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
