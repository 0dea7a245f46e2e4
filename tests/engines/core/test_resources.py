"""Resources that the engines of a rank share have one owner."""

from __future__ import annotations

import pytest

from engines.core.resources import open_rank_resources, rank_resources
from tests.engines.support.rank_resources import separate_rank_resources

ENDED: list[str] = []


class First:
    def close(self) -> None:
        ENDED.append("first")


class Second(dict[str, int]):
    """A resource without a ``close``."""


class Third:
    def close(self) -> None:
        ENDED.append("third")


def test_an_entry_is_made_once_and_the_newest_is_released_first() -> None:
    ENDED.clear()
    with separate_rank_resources() as resources:
        assert resources.get(First) is resources.get(First)
        resources.get(Second)["a"] = 1
        assert resources.get(Second) == {"a": 1}
        resources.get(Third)
    assert ENDED == ["third", "first"]
    assert resources.get(Second) == {}, "after the end a resource is new"


class Failing:
    def close(self) -> None:
        raise OSError("the device is gone")


def test_one_that_cannot_be_released_keeps_none_of_the_others() -> None:
    ENDED.clear()
    outside = rank_resources()
    with pytest.raises(OSError, match="the device is gone"), separate_rank_resources() as resources:
        assert all(resources.get(kind) for kind in (First, Failing, Third))
    assert ENDED == ["third", "first"]
    assert rank_resources() is outside


def test_a_rank_begins_with_nothing_of_the_one_before() -> None:
    with separate_rank_resources():
        before = rank_resources().get(Second)
        opened = open_rank_resources()
        assert opened is rank_resources()
        assert opened.get(Second) is not before


def test_what_was_there_before_a_block_is_back_after_it() -> None:
    outside = rank_resources()
    with separate_rank_resources() as inside:
        assert rank_resources() is inside
    assert rank_resources() is outside
