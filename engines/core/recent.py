"""An LRU cache with a destructor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """A cache of at most ``most`` entries. The least recently used is evicted before another is made; ``let_go`` frees
    it.

    Ranks that request the same keys in the same order hold the same entries.
    """

    def __init__(self, most: int, let_go: Callable[[T], None] = lambda _: None) -> None:
        assert most > 0
        self._most, self._let_go = most, let_go
        self._things: OrderedDict[Hashable, T] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._things

    def __iter__(self) -> Iterator[T]:
        """Iterate over the entries, least recently used first."""
        return iter(self._things.values())

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the entry of ``key``, made if missing. An error in ``make`` leaves the key without an entry."""
        if key not in self._things:
            while len(self._things) >= self._most:
                self._let_go(self._things.popitem(last=False)[1])
            self._things[key] = make()
        self._things.move_to_end(key)
        return self._things[key]

    def drop(self, key: Hashable) -> None:
        """Evict the entry of ``key``, if there is one."""
        if key in self._things:
            self._let_go(self._things.pop(key))

    def clear(self) -> None:
        """Evict all entries."""
        while self._things:
            self._let_go(self._things.popitem(last=False)[1])
