"""The last things that were asked for, by key."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.core.resources import Recent


@given(keys=st.lists(st.integers(0, 6), max_size=60), most=st.integers(1, 5))
def test_the_last_ones_are_kept_and_all_others_let_go_once(keys: list[int], most: int) -> None:
    made, gone = list[int](), list[int]()
    recent = Recent[int](most, gone.append)

    def make(number: int) -> int:
        made.append(number)
        return number

    for number, key in enumerate(keys):
        last = [older for older in keys[:number][::-1] if older == key]
        known = key in recent
        found = recent.get(key, lambda number=number: make(number))  # type: ignore[misc]
        assert keys[found] == key
        assert (found == number) != known
        assert known <= bool(last)
        expected = list(dict.fromkeys(reversed(keys[: number + 1])))[:most]
        assert {keys[kept] for kept in recent} == set(expected)
    recent.clear()
    assert sorted(gone) == made, "each once"
    assert not list(recent)


def test_what_cannot_be_made_leaves_nothing() -> None:
    recent = Recent[str](1, Mock())
    with pytest.raises(RuntimeError):
        recent.get("a", Mock(side_effect=RuntimeError))
    assert "a" not in recent
    assert recent.get("a", lambda: "made") == "made"


def test_what_is_dropped_is_let_go_of_and_made_again() -> None:
    let_go = Mock()
    recent = Recent[str](2, let_go)
    recent.get("a", lambda: "old")
    recent.drop("a")
    recent.drop("b")
    let_go.assert_called_once_with("old")
    assert recent.get("a", lambda: "new") == "new"
