"""The known name that somebody probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MIN_LIKENESS = 0.75
MAX_CHARS = 100
"""Longer names are not compared: that takes quadratic time, and nobody means one of ours by them."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question for a message, as "did you mean num_ranks?" of "num_rankz" or "ranks"; "" if none is near."""
    if len(name) > MAX_CHARS:
        return ""
    names = tuple(known)
    words = set(name.split("_"))
    nearest = get_close_matches(name, names, n=1, cutoff=MIN_LIKENESS)
    nearest += [longer for longer in names if words < set(longer.split("_"))]
    return f"did you mean {nearest[0]}?" if nearest else ""
