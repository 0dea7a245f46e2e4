"""How many ranks of a gang may work together, and which. Without torch: schedulers ask too."""

from __future__ import annotations


def aligned_runs(num_ranks: int, width: int) -> list[tuple[int, ...]]:
    """Consecutive ranks of that number, starting at its multiples."""
    return [tuple(range(start, start + width)) for start in range(0, num_ranks - width + 1, width)]


def gang_widths(num_ranks: int) -> tuple[int, ...]:
    """Widths at which a gang can run steps: the divisors of its size, so that teams of one width fill it."""
    return tuple(width for width in range(1, num_ranks + 1) if num_ranks % width == 0)
