"""Teams of an elastic gang: the jobs that run side by side and their numbers of ranks, by the predicted mean wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from engines.gang.eta.simulation import finish_times_s
from engines.gang.policies.policy import Candidate, GangShape, Ranks, Teams

Sizes = tuple[int, ...]


@cache
def divisions(num_ranks: int, team_sizes: Sizes) -> tuple[Sizes, ...]:
    """Return every way to split ``num_ranks`` into teams of these sizes, each from largest to smallest."""

    def split(num_left: int, largest: int) -> Iterator[Sizes]:
        if not num_left:
            yield ()
        for size in sorted((size for size in team_sizes if size <= min(num_left, largest)), reverse=True):
            for others in split(num_left - size, size):
                yield (size, *others)

    return tuple(split(num_ranks, num_ranks))


def placed(assignment: Sequence[tuple[Candidate, int]], gang: GangShape) -> dict[str, Ranks] | None:
    """Return ranks for each job's team of the given size, aligned to it; None if they do not fit.

    A job stays on its ranks, or on ranks that hold its state, if that leaves room for the others. Other jobs prefer
    ranks that have their additions.
    """
    return _place(assignment, gang, keeps=True) or _place(assignment, gang, keeps=False)


def num_moves(teams: Mapping[str, Ranks], candidates: Sequence[Candidate]) -> int:
    """Return the number of jobs whose state must move to ranks that lack it."""
    begun = (candidate for candidate in candidates if candidate.has_begun and candidate.id in teams)
    return sum(not set(teams[candidate.id]) <= set(candidate.holders) for candidate in begun)


def _place(assignment: Sequence[tuple[Candidate, int]], gang: GangShape, *, keeps: bool) -> dict[str, Ranks] | None:
    free, teams = set(gang.ranks), {}
    for candidate, size in sorted(assignment, key=lambda pair: (-pair[1], pair[0].number)):
        places = [tuple(range(first, first + size)) for first in range(0, gang.num_ranks - size + 1, size)]
        open_places = [place for place in places if free.issuperset(place)]
        if not open_places:
            return None
        home = set(candidate.ranks or candidate.holders) if keeps else set()
        place = min(
            open_places,
            key=lambda place: (
                not home.issuperset(place),
                home.isdisjoint(place),
                gang.switching_s(candidate.job, place) > 0,
                place,
            ),
        )
        teams[candidate.id] = place
        free.difference_update(place)
    return teams


NO_LIMITS: Mapping[str, float] = MappingProxyType({})

PAUSE_SHARE = 0.005
"""A running job is paused for others, rather than narrowed, only if that shortens the predicted waits by this
fraction. More costs the small ones much and helps the large ones little (``docs/scale/policies.md`` has the
figures)."""

HYSTERESIS_SHARE = 0.02
"""Teams change only if that shortens the predicted waits by this fraction."""

FUTURE_ARRIVAL_WEIGHT = 1.0
"""Weight, in jobs, of the time until all current jobs end: one future arrival is assumed to start then."""

MAX_COMPARED = 24
"""Most urgent jobs that are compared; jobs behind them wait in any division."""


def quickest_teams(
    ordered: Sequence[Candidate], gang: GangShape, num_first: int = 0, limits_s: Mapping[str, float] = NO_LIMITS
) -> Teams:
    """Return teams for the first of ``ordered``: the division of the gang with the shortest waits of all jobs.

    Each division is simulated to the end (``finish_times_s``) with the most urgent jobs on its teams. It is simulated
    again with running jobs, on fewer ranks, in place of the last of these, since a pause may gain little. A team wider
    than its job can use gets fewer ranks. At least one of ``ordered`` may run; the first ``num_first`` keep their
    places. The number of jobs later than ``limits_s`` (seconds from now) is minimized first.
    """
    near = [*ordered[:MAX_COMPARED], *(one for one in ordered[MAX_COMPARED:] if one.ranks or one.has_begun)]
    options = []
    for number, assignment in enumerate(_variants(near, gang, num_first)):
        teams = placed(assignment, gang)
        if teams is not None:
            times_s = finish_times_s(assignment, [one for one in near if one.id not in teams], gang, teams)
            num_late = sum(times_s[job_id] > limit_s for job_id, limit_s in limits_s.items() if job_id in times_s)
            moving_s = gang.move_s * num_moves(teams, near)
            options.append((num_late, _cost_s(times_s, moving_s, teams, near), number, teams))
    *_, best = min(options, key=lambda option: option[:3])
    return best


def _variants(ordered: Sequence[Candidate], gang: GangShape, num_first: int) -> Iterator[list[tuple[Candidate, int]]]:
    """Yield distinct assignments: jobs with the sizes of their teams."""
    seen, may_run = set(), [one for one in ordered if one.may_run]
    for sizes in divisions(gang.num_ranks, gang.team_sizes):
        if len(sizes) > len(may_run):
            continue
        for jobs in _choices(may_run, len(sizes), num_first):
            for in_order in (jobs, sorted(jobs, key=lambda one: (-one.shortest_left_s, one.number))):
                assignment = _assign(in_order, sizes)
                key = tuple((one.id, size) for one, size in assignment)
                if key not in seen:
                    seen.add(key)
                    yield assignment


def _choices(ordered: Sequence[Candidate], num: int, num_first: int) -> Iterator[list[Candidate]]:
    """Yield ``num`` jobs: the most urgent, then variants whose last ones are running jobs instead."""
    yield list(ordered[:num])
    behind = [one for one in ordered[num:] if one.ranks and one.has_begun]
    for num_running in range(1, min(len(behind), num - max(1, num_first)) + 1):
        yield [*ordered[: num - num_running], *behind[:num_running]]


def _assign(jobs: Sequence[Candidate], sizes: Sizes) -> list[tuple[Candidate, int]]:
    return [(one, one.useful_size(size)) for one, size in zip(jobs, sizes, strict=True)]


def _cost_s(
    times_s: Mapping[str, float], moving_s: float, teams: Mapping[str, Ranks], ordered: Sequence[Candidate]
) -> float:
    """Return the sum of predicted waits, with penalties for changes. All jobs wait while states move."""
    sum_s = sum(times_s.values()) + FUTURE_ARRIVAL_WEIGHT * max(times_s.values()) + moving_s * len(ordered)
    running = [one for one in ordered if one.ranks]
    if any(one.has_begun and one.id not in teams for one in running):
        sum_s *= 1 + PAUSE_SHARE
    if any(teams.get(one.id) != one.ranks for one in running):
        sum_s *= 1 + HYSTERESIS_SHARE
    return sum_s
