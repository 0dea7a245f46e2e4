"""Nouns and numbers in messages."""

from __future__ import annotations


def counted(number: int, one: str, many: str) -> str:
    """Return ``number`` and the noun in its singular or plural: "1 picture", "0 pictures"."""
    return f"{number} {one if number == 1 else many}"


def decimal(seconds: float) -> str:
    """Return at most three decimals, without zeros at the end."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
