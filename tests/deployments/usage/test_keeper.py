"""Reservations wait for room at the keeper, while their replica withdraws or repeats them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployments.usage import keeper as keepers
from deployments.usage.keeper import LEASE_S, AccountKeeper
from deployments.usage.quotas import MINUTE_S, Account, KeyLimits, LimitReachedError
from tests.deployments.usage.conftest import MINE, SetTime
from tests.support.patience import PATIENCE_S

LIMITS = (KeyLimits(key=MINE[:8], max_concurrent=2),)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, clock: SetTime) -> AccountKeeper:
    """Return a keeper with an unlimited wait for room."""
    monkeypatch.setattr(keepers, "GRACE_S", PATIENCE_S)
    return AccountKeeper(LIMITS, clock)


def account(version: int, pending: tuple[str, ...] = (), **reserved: int) -> Account:
    return Account(since=0, version=version, reserved=reserved, pending=set(pending))


async def test_what_was_withdrawn_while_it_waited_is_not_granted(
    keeper: AccountKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await keeper.reserve("first", MINE, account(1, ("held",), held=2), "held", 0) is None
    asking = asyncio.create_task(keeper.reserve("first", MINE, account(2, ("asked",), held=2, asked=2), "asked", 0))
    await asyncio.sleep(0)
    await keeper.report("first", {MINE: account(3, held=2)})
    await keeper.report("first", {MINE: account(4)})
    assert isinstance(await asking, LimitReachedError)
    monkeypatch.setattr(keepers, "GRACE_S", 0.0)
    assert await keeper.reserve("first", MINE, account(5, ("next",), next=2), "next", 0) is None


async def test_a_call_that_is_repeated_while_the_first_waits_is_granted_once(
    keeper: AccountKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await keeper.reserve("first", MINE, account(1, ("held",), held=2), "held", 0) is None
    both = account(2, ("asked",), held=2, asked=1)
    asking = [asyncio.create_task(keeper.reserve("first", MINE, both, "asked", 0)) for _ in range(2)]
    await asyncio.sleep(0)
    await keeper.report("first", {MINE: account(3, ("asked",), asked=1)})
    assert await asyncio.gather(*asking) == [None, None]
    monkeypatch.setattr(keepers, "GRACE_S", 0.0)
    refused = keeper.reserve("second", MINE, account(1, ("other",), other=2), "other", 0)
    assert isinstance(await refused, LimitReachedError), "one is under way"
    await keeper.report("first", {MINE: account(4)})
    assert await keeper.reserve("first", MINE, account(5, ("next",), next=2), "next", 0) is None


async def test_a_late_report_changes_nothing(keeper: AccountKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late report neither ends later grants nor restores what has ended."""
    monkeypatch.setattr(keepers, "GRACE_S", 0.0)
    assert await keeper.reserve("first", MINE, account(2, ("held",), held=2), "held", 0) is None
    await keeper.report("first", {MINE: account(1)})
    other = account(1, ("other",), other=1)
    assert isinstance(await keeper.reserve("second", MINE, other, "other", 0), LimitReachedError)
    await keeper.report("first", {MINE: account(4)})
    await keeper.report("first", {MINE: account(3, held=2)})
    assert await keeper.reserve("second", MINE, other, "other", 0) is None


async def test_replicas_that_are_gone_are_forgotten_once_nothing_of_theirs_counts(
    keeper: AccountKeeper, clock: SetTime
) -> None:
    """A silent replica that comes back says all again."""
    used = Account(since=0, version=1, num_requests=1, gpu_s=4.0, charges=[(0.0, 4.0)])
    for replica in ("gone", "silent"):
        await keeper.report(replica, {MINE: used})
    clock.now_s += LEASE_S + 1
    assert (await keeper.report("alive", {MINE: account(1)}))[MINE].last_minute_s == 8.0
    clock.now_s += MINUTE_S
    assert (await keeper.report("silent", {MINE: replace(used, version=2, charges=[])}))[MINE].gpu_s == 4.0
    assert keeper._accounts[MINE].keys() == keeper._heard_s.keys() == {"alive", "silent"}
