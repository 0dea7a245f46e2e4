"""How many ranks of a gang may work together, and which. Without torch: schedulers ask too."""

from __future__ import annotations


def aligned_runs(num_ranks: int, team_size: int) -> list[tuple[int, ...]]:
    """Teams of ``team_size`` consecutive ranks, each starting at a multiple of it."""
    return [tuple(range(start, start + team_size)) for start in range(0, num_ranks - team_size + 1, team_size)]


def tiling_sizes(num_ranks: int) -> tuple[int, ...]:
    """The sizes of teams that a gang can form: the divisors of its own, so that teams of one size fill it."""
    return tuple(team_size for team_size in range(1, num_ranks + 1) if num_ranks % team_size == 0)
