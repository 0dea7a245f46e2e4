"""Reservations that wait for room at the keeper, while those who asked for them leave or ask again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployments.usage import keeper as keepers
from deployments.usage.api_keys import hash_of
from deployments.usage.interface import Refusal, Reservation
from deployments.usage.keeper import AccountKeeper
from deployments.usage.quotas import KeyLimits
from tests.deployments.usage.test_quotas import SetTime
from tests.support.patience import PATIENCE_S

MINE = hash_of("mine")
LIMITS = (KeyLimits(key=MINE[:8], max_concurrent=2),)


@pytest.fixture
async def keeper(monkeypatch: pytest.MonkeyPatch) -> AccountKeeper:
    """One that waits for room as long as it takes, and has heard of one holder."""
    monkeypatch.setattr(keepers, "GRACE_S", PATIENCE_S)
    keeper = AccountKeeper(LIMITS, SetTime())
    await keeper.renew("first", [], [], {})
    return keeper


async def test_what_was_taken_back_while_it_waited_is_not_taken(
    keeper: AccountKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked is gone, and its key may have nothing else under way by which the keeper would hear of that."""
    held, asked = (Reservation(id=name, holder="first", key=MINE, num=2) for name in ("held", "asked"))
    assert await keeper.reserve(held) is None
    asking = asyncio.create_task(keeper.reserve(asked))
    await asyncio.sleep(0)
    await keeper.settle("first", ["asked"], {})
    await keeper.settle("first", ["held"], {})
    assert isinstance(await asking, Refusal)
    monkeypatch.setattr(keepers, "GRACE_S", 0.0)
    assert await keeper.reserve(replace(asked, id="next")) is None


async def test_who_asks_again_while_the_first_call_waits_takes_it_once(
    keeper: AccountKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, asked = (Reservation(id=name, holder="first", key=MINE, num=num) for name, num in (("held", 2), ("asked", 1)))
    assert await keeper.reserve(held) is None
    asking = [asyncio.create_task(keeper.reserve(asked)) for _ in range(2)]
    await asyncio.sleep(0)
    await keeper.settle("first", ["held"], {})
    assert await asyncio.gather(*asking) == [None, None]
    await keeper.settle("first", ["asked"], {})
    monkeypatch.setattr(keepers, "GRACE_S", 0.0)
    assert await keeper.reserve(replace(held, id="next")) is None
