"""Resources shared by all engines of a rank: made at first use, released together by one owner.

Process groups, side streams and memory that other ranks write belong to a rank, not to one of its engines.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar, cast

T = TypeVar("T")


class RankResources:
    """The owner. A rank actor makes one, and closes it after its engines and before its communicator.

    Outside a gang (tests, benchmarks, commands) one lives as long as the process.
    """

    def __init__(self) -> None:
        self._entries: dict[type, Any] = {}

    def get(self, kind: type[T]) -> T:
        """Return this rank's only ``kind()``, made at the first call."""
        if kind not in self._entries:
            self._entries[kind] = kind()
        return cast(T, self._entries[kind])

    def close(self) -> None:
        """Release all entries, the newest first, by their ``close`` if they have one. Errors are raised at the end."""
        with ExitStack() as closing:
            for entry in self._entries.values():
                if hasattr(entry, "close"):
                    closing.callback(entry.close)
            self._entries.clear()


_current = RankResources()


def rank_resources() -> RankResources:
    """Return the resources of this process's rank."""
    return _current


def open_rank_resources() -> RankResources:
    """Replace this process's resources by new ones and return them."""
    global _current
    _current = RankResources()
    return _current
