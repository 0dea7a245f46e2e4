"""Which jobs run side by side in an elastic gang, and on how many ranks each: by the mean wait that is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from engines.gang.eta.simulation import finish_times_s
from engines.gang.policies.policy import Candidate, GangShape, Ranks, Teams

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


NO_LIMITS: Mapping[str, float] = MappingProxyType({})

PAUSE_SHARE = 0.005
"""A running job is paused for others, rather than narrowed, only if that makes the predicted waits so much shorter.
More costs the small ones much and helps the large ones little (``docs/scale/policies.md`` has the figures)."""

HYSTERESIS_SHARE = 0.02
"""Teams are changed only if that makes the predicted waits so much shorter."""

NUM_TO_COME = 1.0
"""So many jobs are thought of as waiting for all others to end: who comes next begins when these are done."""

MAX_LOOKED_AT = 24
"""So many jobs are gone through when divisions are compared: those that wait behind them wait in all cases."""


def quickest_teams(
    ordered: Sequence[Candidate], gang: GangShape, num_first: int = 0, limits_s: Mapping[str, float] = NO_LIMITS
) -> Teams:
    """Return teams for the first of ``ordered``: the division of the gang by which all of them wait least.

    Each division is simulated to the end (``finish_times_s``), with the most urgent jobs on its teams, and with jobs
    that run already in the place of the last of these: narrowed, where to pause them would gain little. A job on a team
    that is wider than it can use gets fewer ranks. At least one of ``ordered`` may run; the first ``num_first``
    give their places to no other. Before all else, as few jobs as can be are done later than their ``limits_s`` say, in
    seconds from now.
    """
    near = [*ordered[:MAX_LOOKED_AT], *(one for one in ordered[MAX_LOOKED_AT:] if one.ranks or one.has_begun)]
    options = []
    for number, seated in enumerate(_seatings(near, gang, num_first)):
        teams = placed(seated, gang)
        if teams is not None:
            times_s = finish_times_s(seated, [one for one in near if one.id not in teams], gang)
            num_late = sum(times_s[job_id] > limit_s for job_id, limit_s in limits_s.items() if job_id in times_s)
            moving_s = gang.move_s * num_moves(teams, near)
            options.append((num_late, _cost_s(times_s, moving_s, teams, near), number, teams))
    *_, best = min(options, key=lambda option: option[:3])
    return best


def _seatings(ordered: Sequence[Candidate], gang: GangShape, num_first: int) -> Iterator[list[tuple[Candidate, int]]]:
    """Yield jobs with the sizes of their teams, none twice."""
    seen, may_run = set(), [one for one in ordered if one.may_run]
    for sizes in divisions(gang.num_ranks, gang.team_sizes):
        if len(sizes) > len(may_run):
            continue
        for jobs in _choices(may_run, len(sizes), num_first):
            for in_order in (jobs, sorted(jobs, key=lambda one: (-one.shortest_left_s, one.number))):
                seated = _seated(in_order, sizes)
                key = tuple((one.id, size) for one, size in seated)
                if key not in seen:
                    seen.add(key)
                    yield seated


def _choices(ordered: Sequence[Candidate], num: int, num_first: int) -> Iterator[list[Candidate]]:
    """Yield ``num`` jobs: the most urgent, and these with some that run in the place of the last of them."""
    yield list(ordered[:num])
    behind = [one for one in ordered[num:] if one.ranks and one.has_begun]
    for num_kept in range(1, min(len(behind), num - max(1, num_first)) + 1):
        yield [*ordered[: num - num_kept], *behind[:num_kept]]


def _seated(jobs: Sequence[Candidate], sizes: Sizes) -> list[tuple[Candidate, int]]:
    return [(one, one.useful_size(size)) for one, size in zip(jobs, sizes, strict=True)]


def _cost_s(
    times_s: Mapping[str, float], moving_s: float, teams: Mapping[str, Ranks], ordered: Sequence[Candidate]
) -> float:
    """Return the sum of predicted waits, and what speaks for leaving things as they are: all wait while states go from
    rank to rank."""
    sum_s = sum(times_s.values()) + NUM_TO_COME * max(times_s.values()) + moving_s * len(ordered)
    running = [one for one in ordered if one.ranks]
    if any(one.has_begun and one.id not in teams for one in running):
        sum_s *= 1 + PAUSE_SHARE
    if any(teams.get(one.id) != one.ranks for one in running):
        sum_s *= 1 + HYSTERESIS_SHARE
    return sum_s
