"""What all engines of a rank share: made at first use, kept by one owner, released together.

Process groups, side streams and memory that other ranks write belong to a rank and to no single engine of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar, cast

T = TypeVar("T")


class RankResources:
    """The owner. A rank actor makes one and closes it after its engines and before its communicator.

    Outside of a gang (tests, benchmarks, commands) there is one for the life of the process.
    """

    def __init__(self) -> None:
        self._entries: dict[type, Any] = {}

    def get(self, kind: type[T]) -> T:
        """The one ``kind()`` of this rank, made at the first call."""
        if kind not in self._entries:
            self._entries[kind] = kind()
        return cast(T, self._entries[kind])

    def close(self) -> None:
        """Release all, the newest first. An entry that has something to end has a ``close``; what one of them raises
        comes after the others are released."""
        with ExitStack() as closing:
            for entry in self._entries.values():
                if hasattr(entry, "close"):
                    closing.callback(entry.close)
            self._entries.clear()


_current = RankResources()


def rank_resources() -> RankResources:
    """The resources of the rank that this process is."""
    return _current


def open_rank_resources() -> RankResources:
    """New ones, from here on those of this process."""
    global _current
    _current = RankResources()
    return _current
