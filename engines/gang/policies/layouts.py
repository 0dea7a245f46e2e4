"""Ways to cut a gang into teams, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from engines.gang.policies.candidate import Candidate, GangShape, Ranks

Sizes = tuple[int, ...]


@cache
def divisions(num_ranks: int, team_sizes: Sizes) -> tuple[Sizes, ...]:
    """Return every way to cut so many ranks into teams of these sizes, each from the largest to the smallest."""

    def cut(rest: int, largest: int) -> Iterator[Sizes]:
        if not rest:
            yield ()
        for size in sorted((size for size in team_sizes if size <= min(rest, largest)), reverse=True):
            for others in cut(rest - size, size):
                yield (size, *others)

    return tuple(cut(num_ranks, num_ranks))


def placed(wanted: Sequence[tuple[Candidate, int]], gang: GangShape) -> dict[str, Ranks] | None:
    """Return ranks for each job's team of that size, at a multiple of it; None if there is no such place.

    A job stays where it is, or with ranks that have its state, if that leaves room for those after it.
    """
    return _placed(wanted, gang, keeps=True) or _placed(wanted, gang, keeps=False)


def num_moves(teams: Mapping[str, Ranks], candidates: Sequence[Candidate]) -> int:
    """Return for how many jobs a state has to go to ranks that do not have it."""
    begun = (candidate for candidate in candidates if candidate.has_begun and candidate.id in teams)
    return sum(not set(teams[candidate.id]) <= set(candidate.holders) for candidate in begun)


def _placed(wanted: Sequence[tuple[Candidate, int]], gang: GangShape, *, keeps: bool) -> dict[str, Ranks] | None:
    free, teams = set(gang.ranks), {}
    for candidate, size in sorted(wanted, key=lambda pair: (-pair[1], pair[0].number)):
        places = [tuple(range(first, first + size)) for first in range(0, gang.num_ranks - size + 1, size)]
        open_places = [place for place in places if free.issuperset(place)]
        if not open_places:
            return None
        home = set(candidate.ranks or candidate.holders) if keeps else set()
        place = min(open_places, key=lambda place: (not home.issuperset(place), home.isdisjoint(place), place))
        teams[candidate.id] = place
        free.difference_update(place)
    return teams
