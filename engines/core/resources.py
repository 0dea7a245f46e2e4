"""Resources shared by all engines of a rank, and an LRU cache with a destructor.

Process groups, side streams and memory that other ranks write belong to a rank, not to one of its engines. They are
made at first use and released together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of a process whose weights can sleep, in bytes."""

    device: str = ""
    """Id of the device, the same in all processes that share it."""
    device_bytes: int = 0
    """Its whole memory; 0 on a CPU, whose processes share what the configuration says."""
    weights: int = 0
    """Weights, on the device while awake and on the host while asleep."""
    beside: int = 0
    """Other memory that the process's allocator holds on the device."""
    peak: int = 0
    """The most of that outside loads of weights so far: a step or a decode under way may take as much again."""
    pinned: int = 0
    """Host memory that is pinned for the copy."""


class RankResources:
    """The owner. A rank actor makes one, and closes it after its engines and before its communicator.

    Outside a gang (tests, benchmarks, commands), one exists as long as the process.
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


class Numbered(list[T]):
    """Values by their number, by which compiled code refers to them. None is dropped before the rank ends."""

    def number_of(self, value: T) -> int:
        """Return the number of ``value``, which is added if it is new."""
        if value not in self:
            self.append(value)
        return self.index(value)


class LRUCache(Generic[T]):
    """A cache of ``capacity`` entries. The least recently used is evicted, and freed, before another is made.

    Ranks that request the same keys in the same order hold the same entries.
    """

    def __init__(self, capacity: int, free: Callable[[T], None] = lambda _: None) -> None:
        assert capacity > 0
        self._capacity, self._free = capacity, free
        self._entries: OrderedDict[Hashable, T] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[T]:
        """Iterate over the entries, least recently used first."""
        return iter(self._entries.values())

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the entry of ``key``, made if missing. An error in ``make`` leaves the key without an entry."""
        if key not in self._entries:
            while len(self._entries) >= self._capacity:
                self._free(self._entries.popitem(last=False)[1])
            self._entries[key] = make()
        self._entries.move_to_end(key)
        return self._entries[key]

    def drop(self, key: Hashable) -> None:
        """Evict the entry of ``key``, if there is one."""
        if key in self._entries:
            self._free(self._entries.pop(key))

    def clear(self) -> None:
        """Evict all entries."""
        while self._entries:
            self._free(self._entries.popitem(last=False)[1])
