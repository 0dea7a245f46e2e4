"""The known name that somebody probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MIN_LIKENESS = 0.75
MAX_CHARS = 100
"""Longer names are not compared: that takes quadratic time, and nobody means one of ours by them."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Returns the one of ``known`` that is spelt alike, or has all words of ``name``; empty if there is none."""
    if len(name) > MAX_CHARS:
        return ""
    names = tuple(known)
    words = set(name.split("_"))
    alike = get_close_matches(name, names, n=1, cutoff=MIN_LIKENESS)
    longer = [one for one in names if words < set(one.split("_"))]
    return next(iter(alike + longer), "")
