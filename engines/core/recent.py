"""What was used last, and no more of it than fits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """At most ``most`` things by key. Before another is made, the one that was asked for longest ago goes: ``let_go``
    ends it, where things have an end.

    Ranks that ask for the same keys in the same order have the same ones.
    """

    def __init__(self, most: int, let_go: Callable[[T], None] = lambda _: None) -> None:
        assert most > 0
        self._most, self._let_go = most, let_go
        self._things: OrderedDict[Hashable, T] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._things

    def __iter__(self) -> Iterator[T]:
        """Goes through the things, the one that was asked for longest ago first."""
        return iter(self._things.values())

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the thing of a key, made where there is none. What ``make`` raises leaves the key without one."""
        if key not in self._things:
            while len(self._things) >= self._most:
                self._let_go(self._things.popitem(last=False)[1])
            self._things[key] = make()
        self._things.move_to_end(key)
        return self._things[key]

    def drop(self, key: Hashable) -> None:
        """Lets go of the thing of a key, if there is one."""
        if key in self._things:
            self._let_go(self._things.pop(key))

    def clear(self) -> None:
        """Lets go of all of them."""
        while self._things:
            self._let_go(self._things.popitem(last=False)[1])
