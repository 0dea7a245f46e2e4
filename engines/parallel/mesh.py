"""Teams: ranks of a gang that may work together on a step, and the process groups between them.

Making a process group is collective over the whole gang. So all groups are made at start, on every rank in the same
order. A step only looks its team up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch.distributed as dist

from engines.core.resources import rank_resources
from engines.core.spec import AXES, ParallelSpec, aligned_runs
from engines.parallel.collectives import Axis
from engines.parallel.nccl_options import inherited_options

ALONE = Axis(ranks=(0,), index=0)
_CONTEXT = ("ring", "allgather_kv", "ulysses")


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """The ranks of one step as one of them sees them: an ``Axis`` per strategy."""

    ranks: tuple[int, ...]
    """Numbers in the gang."""
    spec: ParallelSpec
    """Degrees of the strategies, which are the sizes of the axes."""
    guidance: Axis
    """Ranks with other branches of the step."""
    ring: Axis
    """Ranks that pass keys and values round."""
    allgather_kv: Axis
    """Ranks that gather keys and values."""
    ulysses: Axis
    """Ranks that exchange tokens for heads."""
    tensor: Axis
    """Ranks with other features of the same layers."""
    context: Axis
    """Ranks with other tokens of one branch and the same weights, in chunk order."""
    pipeline: Axis = ALONE
    """Ranks with other blocks."""
    before: Axis | None = None
    """This rank and its counterpart in the previous pipeline stage, earlier stage first; None in the first."""
    after: Axis | None = None
    """This rank and its counterpart in the next stage, earlier stage first; None in the last."""


class Groups:
    """Process groups by their ranks. Every rank of the gang must request the same groups in the same order."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._names: dict[tuple[int, ...], str] = {}

    @staticmethod
    def of_gang() -> Groups:
        """Return the groups shared within this process for the lifetime of the default process group.

        Call ``engines.parallel.early_start.gang_groups`` instead: it waits for groups that are being made.
        """
        if not dist.is_initialized():
            return Groups(1)
        world = dist.group.WORLD
        assert world is not None
        return rank_resources().get(GroupsOfWorlds).setdefault(world, Groups(world.size()))

    def name(self, ranks: tuple[int, ...]) -> str:
        """Return the group's name; empty for one rank. The first call makes the group, collectively over the gang."""
        if len(ranks) == 1:
            return ""
        if ranks not in self._names:
            self._names[ranks] = new_group(ranks, self._num_ranks)
        return self._names[ranks]


class GroupsOfWorlds(WeakKeyDictionary[dist.ProcessGroup, Groups]):
    """Shared groups by default process group, which is new after each initialisation of ``torch.distributed``."""


class Teams:
    """All teams that a gang may form: ``specs`` on every aligned run of ranks (0-1, 2-3, 0-3 in a gang of four)."""

    def __init__(self, *, rank: int, num_ranks: int, specs: Iterable[ParallelSpec], groups: Groups) -> None:
        self._rank = rank
        self._groups = groups
        self._teams: dict[tuple[tuple[int, ...], ParallelSpec], Team] = {}
        for spec in sorted(set(specs), key=lambda spec: (spec.num_ranks, spec.name)):
            for ranks in aligned_runs(num_ranks, spec.num_ranks):
                self._form(ranks, spec)

    def team(self, ranks: tuple[int, ...], spec: ParallelSpec) -> Team:
        """Return the team of ``ranks`` for ``spec``, formed at start. ValueError if the caller is in no such team."""
        team = self._teams.get((ranks, spec))
        if team is None:
            formed = ", ".join(f"{ranks} {spec.name}" for ranks, spec in self._teams)
            raise ValueError(f"rank {self._rank} is in no team {ranks} for {spec.name}; its teams are: {formed}")
        return team

    def all(self) -> tuple[Team, ...]:
        """Return the caller's teams, small ones first."""
        return tuple(self._teams.values())

    def _form(self, ranks: tuple[int, ...], spec: ParallelSpec) -> None:
        for axes in ((axis,) for axis in AXES):
            self._make_groups(ranks, spec, axes)
        self._make_groups(ranks, spec, _CONTEXT)
        for line in lines(ranks, spec, ("pipeline",)):
            for pair in itertools.pairwise(line):
                self._groups.name(pair)
        if self._rank in ranks:
            axes_of = {axis: self._axis(ranks, spec, (axis,)) for axis in AXES}
            context = self._axis(ranks, spec, _CONTEXT)
            before, after = self._neighbours(axes_of["pipeline"])
            self._teams[ranks, spec] = Team(
                ranks=ranks, spec=spec, context=context, before=before, after=after, **axes_of
            )

    def _neighbours(self, pipeline: Axis) -> tuple[Axis | None, Axis | None]:
        at, pairs = pipeline.index, itertools.pairwise(pipeline.ranks)
        axes = [Axis(ranks=pair, index=0, group=self._groups.name(pair)) for pair in pairs]
        before = replace(axes[at - 1], index=1) if at else None
        after = axes[at] if at < len(axes) else None
        return before, after

    def _make_groups(self, ranks: tuple[int, ...], spec: ParallelSpec, axes: tuple[str, ...]) -> None:
        for line in lines(ranks, spec, axes):
            self._groups.name(line)

    def _axis(self, ranks: tuple[int, ...], spec: ParallelSpec, axes: tuple[str, ...]) -> Axis:
        line = next(line for line in lines(ranks, spec, axes) if self._rank in line)
        return Axis(ranks=line, index=line.index(self._rank), group=self._groups.name(line))


def lines(ranks: tuple[int, ...], spec: ParallelSpec, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """Return the groups of ranks that differ only in their place on ``axes``, when ``ranks`` fill the mesh in order."""
    members: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*(range(spec.degree(axis)) for axis in AXES))
    for rank, place in zip(ranks, places, strict=True):
        other_axes = tuple(index for axis, index in zip(AXES, place, strict=True) if axis not in axes)
        members.setdefault(other_axes, []).append(rank)
    return (tuple(line) for line in members.values())


def new_group(ranks: tuple[int, ...], num_ranks: int) -> str:
    """Return the name of a new process group. Every rank of the gang must make this call."""
    if not dist.is_initialized():
        raise ValueError(f"torch.distributed must be initialised before a team of ranks {ranks} can be formed")
    if len(ranks) == num_ranks:
        assert dist.group.WORLD is not None
        return str(dist.group.WORLD.group_name)
    group = dist.new_group(list(ranks), pg_options=inherited_options())
    return str(group.group_name) if isinstance(group, dist.ProcessGroup) else ""


def team_of_one(rank: int = 0) -> Team:
    """Return the team in which a rank works alone; it needs no process group."""
    alone = Axis(ranks=(rank,), index=0)
    axes: Mapping[str, Axis] = dict.fromkeys(AXES, alone)
    return Team(ranks=(rank,), spec=ParallelSpec(), context=alone, **axes)
