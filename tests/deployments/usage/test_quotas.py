"""Limits of keys: the counted work, when one is reached, and until when."""

from __future__ import annotations

import pickle

import pytest

from deployments.usage.accounts import Accounts
from deployments.usage.quotas import Account, Balance, KeyLimits, LimitReachedError, find_limits
from tests.deployments.usage.conftest import MINE, OTHER, SetTime


def test_a_minute_of_use_is_freed_as_it_grows_old() -> None:
    limits, account, now_s = KeyLimits(gpu_seconds_per_minute=10), Account(since=0), 1000.0
    for gpu_s in (4.0, 5.0, 3.0):
        limits.check_minute(account.charges, now_s)
        account.charge(gpu_s, now_s, is_finished=True)
        now_s += 10
    with pytest.raises(LimitReachedError, match=r"12\.0 GPU-seconds in the last minute, and 10 may be") as caught:
        limits.check_minute(reversed(account.charges), now_s)
    assert caught.value.retry_after_s == 30, "then the first is a minute old"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "a keeper sends it"
    limits.check_minute([], now_s)
    now_s += 30
    limits.check_minute(account.charges, now_s)
    assert Balance.of([account], now_s) == Balance(since=0, num_requests=3, gpu_s=12.0, last_minute_s=8.0)


async def test_what_nobody_asks_for_is_forgotten(clock: SetTime) -> None:
    accounts = Accounts(clock=clock)
    for _ in range(10):
        accounts.charge(MINE, "m", 1.0)
        clock.now_s += 25
    assert len(accounts._accounts[MINE].charges) == 3
    balance = await accounts.used(MINE)
    assert (balance.num_requests, balance.gpu_s, balance.last_minute_s) == (10, 10.0, 2.0)
    assert (await accounts.used(OTHER)).gpu_s == 0


def test_a_statement_counts_by_its_age() -> None:
    """Its times belong to no process's clock."""
    first, second = Account(since=7), Account(since=3)
    first.charge(4.0, 1000.0, is_finished=True)
    second.charge(5.0, 20.0, is_finished=True)
    first.charge(1.5, 1050.0, is_finished=False)
    told = first.statement(1050.0)
    assert told.charges == [(-50.0, 4.0), (0.0, 1.5)]
    accounts = [told.shifted(50.0), second]
    expected = Balance(since=3, num_requests=2, gpu_s=10.5, last_minute_s=10.5)
    assert Balance.of(accounts, 50.0) == expected, "an early end is no finished request"
    assert Balance.of(accounts, 61.0).last_minute_s == 6.5
    assert first.statement(1111.0).charges == []


def test_so_many_are_under_way_and_no_more() -> None:
    limits = KeyLimits(max_concurrent=3)
    with pytest.raises(LimitReachedError, match="2 pictures and clips of this key under way; the limit is 3"):
        limits.check_open(2, 2)
    with pytest.raises(LimitReachedError, match="3 pictures and clips"):
        limits.check_open(3, 1)
    limits.check_open(0, 3)
    KeyLimits().check_open(1000, 1000)


def test_an_entry_of_its_own_wins() -> None:
    limits = (KeyLimits(weight=2), KeyLimits(key=MINE[:8], weight=5))
    assert [find_limits(limits, key).weight for key in (MINE, OTHER, "")] == [5, 2, 2]
    assert find_limits((), MINE) == KeyLimits()


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
