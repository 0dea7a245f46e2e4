"""Which ranks each job should have when the whole gang is shared out. Pure: no Ray, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Ranks = tuple[int, ...]


def share_out(ranks: Ranks, homes: Mapping[str, int | None], team_sizes: Sequence[int]) -> dict[str, Ranks]:
    """A team for every job: as large as possible, smaller the more jobs there are, of one of the gang's ``team_sizes``.

    ``homes`` are the jobs in order of age, each with a rank that holds its state (None: no rank does yet); it stays
    there if the shares allow that. Four ranks go 4, 2 + 2, 2 + 1 + 1, 1 + 1 + 1 + 1; jobs that are more than the
    smallest teams share them, and take turns.
    """
    parts = _parts(ranks, team_sizes)
    if not parts or len(homes) < len(parts):
        return dict.fromkeys(homes, ranks)
    shares: dict[str, Ranks] = {}
    for part, jobs in _spread(homes, parts):
        shares |= share_out(part, {job: homes[job] for job in jobs}, team_sizes)
    return {job: shares[job] for job in homes}


def _parts(ranks: Ranks, team_sizes: Sequence[int]) -> list[Ranks]:
    """``ranks`` cut into the largest teams that are smaller than all of them; none if there are no such."""
    smaller = [team_size for team_size in team_sizes if team_size < len(ranks) and len(ranks) % team_size == 0]
    if not smaller:
        return []
    team_size = max(smaller)
    return [ranks[first : first + team_size] for first in range(0, len(ranks), team_size)]


def _spread(homes: Mapping[str, int | None], parts: list[Ranks]) -> list[tuple[Ranks, list[str]]]:
    """Gives each part as many jobs as the others, one more to some; jobs that are at home in a part come first."""
    room = [len(homes) // len(parts)] * len(parts)
    num_extra = len(homes) % len(parts)
    placed: list[list[str]] = [[] for _ in parts]
    homeless = []
    for job, home in homes.items():
        at = next((number for number, part in enumerate(parts) if home in part), None)
        if at is not None and len(placed[at]) < room[at] + (num_extra > 0):
            placed[at].append(job)
            num_extra -= len(placed[at]) > room[at]
        else:
            homeless.append(job)
    for job in homeless:  # the youngest share the last part
        first = min(range(len(parts)), key=lambda number: (len(placed[number]), -number if placed[number] else number))
        placed[first].append(job)
    return list(zip(parts, placed, strict=True))
