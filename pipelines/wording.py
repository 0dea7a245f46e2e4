"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: int, one: str, many: str) -> str:
    """Return ``number`` with ``one`` behind it where it is 1, and with ``many`` else: "1 picture", "0 pictures"."""
    return f"{number} {one if number == 1 else many}"
