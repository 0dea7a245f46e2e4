"""The LRU cache: eviction order, freed entries, failed and dropped entries."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.core.resources import LRUCache


@given(keys=st.lists(st.integers(0, 6), max_size=60), capacity=st.integers(1, 5))
def test_least_recently_used_entries_are_freed_once(keys: list[int], capacity: int) -> None:
    made, freed = list[int](), list[int]()
    cache = LRUCache[int](capacity, freed.append)

    def make(number: int) -> int:
        made.append(number)
        return number

    for number, key in enumerate(keys):
        last = [older for older in keys[:number][::-1] if older == key]
        cached = key in cache
        found = cache.get(key, lambda number=number: make(number))  # type: ignore[misc]
        assert keys[found] == key
        assert (found == number) != cached
        assert cached <= bool(last)
        expected = list(dict.fromkeys(reversed(keys[: number + 1])))[:capacity]
        assert {keys[entry] for entry in cache} == set(expected)
    cache.clear()
    assert sorted(freed) == made, "each once"
    assert not list(cache)


def test_failed_make_leaves_no_entry() -> None:
    cache = LRUCache[str](1, Mock())
    with pytest.raises(RuntimeError):
        cache.get("a", Mock(side_effect=RuntimeError))
    assert "a" not in cache
    assert cache.get("a", lambda: "made") == "made"


def test_dropped_entry_is_freed_and_made_again() -> None:
    free = Mock()
    cache = LRUCache[str](2, free)
    cache.get("a", lambda: "old")
    cache.drop("a")
    cache.drop("b")
    free.assert_called_once_with("old")
    assert cache.get("a", lambda: "new") == "new"
