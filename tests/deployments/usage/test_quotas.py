"""Limits of keys: what is counted, when one is reached, and until when."""

from __future__ import annotations

import pytest

from deployments.usage.api_keys import hash_of
from deployments.usage.quotas import KeyLimits, LimitReachedError, Quotas

MINE, OTHER = hash_of("mine"), hash_of("other")


class SetTime:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> SetTime:
    return SetTime()


def quotas_of(clock: SetTime, *limits: KeyLimits) -> Quotas:
    return Quotas(limits, clock)


def test_a_minute_of_use_is_freed_as_it_grows_old(clock: SetTime) -> None:
    quotas = quotas_of(clock, KeyLimits(gpu_seconds_per_minute=10))
    for gpu_s in (4.0, 5.0, 3.0):
        quotas.check(MINE)
        quotas.note(MINE, gpu_s)
        clock.now_s += 10
    with pytest.raises(LimitReachedError, match=r"12\.0 GPU-seconds in the last minute, and 10 may be") as caught:
        quotas.check(MINE)
    assert caught.value.retry_after_s == 30, "then the first is a minute old"
    quotas.check(OTHER)
    clock.now_s += 30
    quotas.check(MINE)
    assert quotas.used(MINE) == (3, 12.0, 8.0)
    assert quotas.used(OTHER) == (0, 0.0, 0.0)


def test_what_nobody_asks_for_is_forgotten(clock: SetTime) -> None:
    quotas = quotas_of(clock)
    for _ in range(10):
        quotas.note(MINE, 1.0)
        clock.now_s += 25
    assert len(quotas._accounts[MINE].latest) == 3
    assert quotas.used(MINE) == (10, 10.0, 2.0)


def test_what_was_used_elsewhere_counts_by_its_age(clock: SetTime) -> None:
    first, second = (quotas_of(clock, KeyLimits(gpu_seconds_per_minute=10)) for _ in range(2))
    first.note(MINE, 4.0)
    clock.now_s += 20
    second.note(MINE, 5.0)
    clock.now_s += 30
    first.note(MINE, 1.5, 0)
    assert first.latest() == {MINE: [(50.0, 4.0, 1), (0.0, 1.5, 0)]}
    for key, uses in first.latest().items():
        second.restore(key, uses)
    assert second.used(MINE) == (2, 10.5, 10.5), "what ended early is no finished request"
    clock.now_s += 11
    assert second.used(MINE) == (2, 10.5, 6.5)
    clock.now_s += 60
    assert first.latest() == {}


def test_so_many_are_under_way_and_no_more(clock: SetTime) -> None:
    quotas = quotas_of(clock, KeyLimits(max_concurrent=3))
    with quotas.taken(MINE, 2):
        with pytest.raises(LimitReachedError, match="2 pictures and clips of this key under way; the limit is 3"):
            quotas.check(MINE, 2)
        with quotas.taken(MINE, 1), quotas.taken(OTHER, 3), pytest.raises(LimitReachedError):
            quotas.check(MINE)
        with pytest.raises(LimitReachedError, match="3 pictures and clips"):
            quotas.check(MINE, 1, num_clips=1)
    quotas.check(MINE, 3)


def test_an_entry_of_its_own_wins(clock: SetTime) -> None:
    quotas = quotas_of(clock, KeyLimits(weight=2), KeyLimits(key=MINE[:8], weight=5))
    assert (quotas.limits_of(MINE).weight, quotas.limits_of(OTHER).weight, quotas.limits_of("").weight) == (5, 2, 2)
    assert quotas_of(clock).limits_of(MINE) == KeyLimits()


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "mine"},
        {"key": MINE[:7]},
        {"name": "all"},
        {"weight": 0},
        {"weight": float("nan")},
        {"max_concurrent": -1},
        {"gpu_seconds_per_minute": 0},
    ],
)
def test_limits_that_cannot_be(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        KeyLimits(**fields)  # type: ignore[arg-type]
