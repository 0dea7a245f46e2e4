"""Two replicas of the API share one keeper: limits hold for both together, whichever of the three dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from deployments.usage import accounts as accounts_module
from deployments.usage import deployed_keeper
from deployments.usage import keeper as keepers
from deployments.usage.accounts import Accounts
from deployments.usage.api_keys import hash_of
from deployments.usage.keeper import LEASE_S, AccountKeeper, AccountsUnavailableError, Keeper
from deployments.usage.quotas import Balance, KeyLimits, LimitReachedError
from tests.deployments.usage.conftest import MINE, SetTime
from tests.support.patience import PATIENCE_S

FREE = hash_of("free")
LIMITS = (KeyLimits(key=MINE[:8], max_concurrent=2, gpu_seconds_per_minute=10), KeyLimits(weight=2))


class Line:
    """A keeper that can be replaced, or be away, and counts the calls of each method."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.is_away, self.calls, self.num_open = keeper, False, Counter[str](), 0
        self.error: Exception = AccountsUnavailableError("away")

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            self.calls[method] += 1
            self.num_open += 1
            try:
                await asyncio.sleep(0)
                if self.is_away:
                    self.calls["lost"] += 1
                    raise self.error
                return await getattr(self.keeper, method)(*args)
            finally:
                self.num_open -= 1

        return call


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "RETRY_S", 0.01)
    monkeypatch.setattr(keepers, "GRACE_S", 0.02)


@pytest.fixture
def line(clock: SetTime) -> Line:
    return Line(AccountKeeper(LIMITS, clock))


@pytest.fixture
async def pair(line: Line, clock: SetTime) -> AsyncIterator[tuple[Accounts, Accounts]]:
    first, second = (Accounts(LIMITS, line, name, clock) for name in ("first", "second"))
    for accounts in (first, second):
        async with accounts.taken(MINE, 1):
            pass
    await settle(first, second)
    line.calls.clear()
    yield first, second
    await settle(first, second)
    for accounts in (first, second):
        accounts._reporting.cancel()  # type: ignore[union-attr]


async def settle(*replicas: Accounts) -> None:
    """Return once the keeper knows of all changes."""
    async with asyncio.timeout(PATIENCE_S):
        while any(one._unreported or one._keeper.num_open for one in replicas):  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)


async def begin(accounts: Accounts, num_clips: int = 0) -> None:
    """Take a picture of MINE that ends at once."""
    async with accounts.taken(MINE, 1, num_clips):
        pass


Pair = tuple[Accounts, Accounts]


async def test_what_is_under_way_counts_together(pair: Pair) -> None:
    first, second = pair
    async with first.taken(MINE, 1), second.taken(MINE, 1):
        for accounts in pair:
            with pytest.raises(LimitReachedError, match="2 pictures and clips of this key under way; the limit is 2"):
                await begin(accounts)
    await settle(*pair)
    async with second.taken(MINE, 1, 1):
        with pytest.raises(LimitReachedError, match="2 pictures and clips"):
            await begin(first, num_clips=1)
        await begin(first)


async def test_of_many_at_once_no_more_than_may_be_are_under_way(pair: Pair) -> None:
    num_open, most, num_refused = 0, 0, 0

    async def ask(accounts: Accounts) -> None:
        nonlocal num_open, most, num_refused
        try:
            async with accounts.taken(MINE, 1):
                num_open += 1
                most = max(most, num_open)
                while num_open + num_refused < 20:  # until all have an answer
                    await asyncio.sleep(0.001)
        except LimitReachedError:
            num_refused += 1

    await asyncio.gather(*(ask(pair[i % 2]) for i in range(20)))
    assert (most, num_refused) == (2, 18)


async def test_who_asks_one_after_the_other_is_never_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "GRACE_S", 60.0)
    monkeypatch.setattr(accounts_module, "SETTLE_AFTER_S", 0.02)
    for i in range(6):
        async with pair[i % 2].taken(MINE, 2):
            pass


async def test_a_minute_of_use_counts_together(pair: Pair, clock: SetTime) -> None:
    for accounts in pair:
        async with accounts.taken(MINE, 1):
            accounts.charge(MINE, "m", 5.0)
        await settle(accounts)
    for accounts in pair:
        with pytest.raises(LimitReachedError, match=r"10\.0 GPU-seconds in the last minute, and 10 may be") as caught:
            await begin(accounts)
        assert caught.value.retry_after_s == 60
        assert (await accounts.used(MINE)).last_minute_s == 10.0
    clock.now_s += 61
    await begin(pair[0])


async def test_a_request_waits_for_one_call_and_for_none_without_limits(pair: Pair, line: Line) -> None:
    first, _ = pair
    async with first.taken(MINE, 2):
        for _ in range(2):
            first.charge(MINE, "m", 1.0)
        assert line.calls["reserve"] == 1
    await settle(first)
    assert line.calls == {"reserve": 1, "report": 1}
    line.calls.clear()
    async with first.taken(FREE, 100):
        first.charge(FREE, "m", 3.0)
    assert (await first.used(FREE)).gpu_s == 3.0
    assert not line.calls


async def test_a_new_keeper_hears_what_is_under_way_and_was_used(pair: Pair, line: Line, clock: SetTime) -> None:
    first, second = pair
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(first.taken(MINE, 1))
        first.charge(MINE, "m", 3.0)
        await asyncio.sleep(0.02)
        first.charge(MINE, "m", 1.0, is_finished=False)
        line.keeper = AccountKeeper(LIMITS, clock)
        await stack.enter_async_context(first.taken(MINE, 1))
        with pytest.raises(LimitReachedError, match="2 pictures and clips of this key under way"):
            async with second.taken(MINE, 1):
                pass
    await settle(first)
    balance = await second.used(MINE)
    assert (balance.num_requests, balance.last_minute_s) == (1, 4.0)
    async with second.taken(MINE, 2):
        pass


async def test_a_new_keeper_hears_from_a_replica_that_nobody_calls(
    pair: Pair, line: Line, clock: SetTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica reports until its usage is older than a minute."""
    monkeypatch.setattr(accounts_module, "RENEW_S", 0.01)
    first, second = pair
    first.charge(MINE, "m", 10.0)
    await settle(first)
    line.keeper = AccountKeeper(LIMITS, clock)
    async with asyncio.timeout(PATIENCE_S):
        while (await second.used(MINE)).last_minute_s < 10.0:
            await asyncio.sleep(0.001)
    with pytest.raises(LimitReachedError, match="GPU-seconds"):
        await begin(second)
    clock.now_s += 61
    await asyncio.wait_for(first._reporting, PATIENCE_S)  # type: ignore[arg-type]


async def test_a_new_keeper_hears_of_what_waits_while_other_keys_are_busy(
    line: Line, clock: SetTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts_module, "RENEW_S", 0.01)
    busy = hash_of("busy")
    limits = (*LIMITS, KeyLimits(key=busy[:8], max_concurrent=1))
    line.keeper = AccountKeeper(limits, clock)
    first, second = (Accounts(limits, line, name, clock) for name in ("first", "second"))
    async with first.taken(MINE, 2):
        line.keeper = AccountKeeper(limits, clock)
        is_refused = False
        async with asyncio.timeout(PATIENCE_S):
            while not is_refused:
                async with first.taken(busy, 1):
                    first.charge(busy, "m", 0.0)
                try:
                    await begin(second)
                except LimitReachedError:
                    is_refused = True
    await settle(first, second)


async def test_what_is_on_its_way_to_a_keeper_that_dies_counts_once(pair: Pair, line: Line, clock: SetTime) -> None:
    """The next keeper gets it again, and may have all reports by then."""
    first, _ = pair
    on_its_way, dies = asyncio.Event(), asyncio.Event()

    async def report(*args: Any) -> Any:
        on_its_way.set()
        await dies.wait()
        return await line.keeper.report(*args)

    line.report = report  # type: ignore[attr-defined]
    first.charge(MINE, "m", 2.0)
    await on_its_way.wait()
    line.keeper = AccountKeeper(LIMITS, clock)
    asking = asyncio.create_task(begin(first))
    await asyncio.wait({asking}, timeout=0.05)
    dies.set()
    await asking
    await settle(first)
    assert (await first.used(MINE)).last_minute_s == 2.0


async def test_a_replica_that_is_gone_has_nothing_under_way(pair: Pair, clock: SetTime) -> None:
    first, second = pair
    async with first.taken(MINE, 2):
        first._reporting.cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)
        clock.now_s += LEASE_S + 1
        async with second.taken(MINE, 2):
            pass


async def test_without_a_keeper_keys_with_limits_are_refused_and_nothing_is_forgotten(pair: Pair, line: Line) -> None:
    first, second = pair
    async with first.taken(MINE, 1):
        line.is_away = True
        with pytest.raises(AccountsUnavailableError):
            async with second.taken(MINE, 1):
                pass
        async with second.taken(FREE, 1):
            pass
        first.charge(MINE, "m", 2.0)
    await asyncio.sleep(0.03)
    line.is_away = False
    await settle(first, second)
    assert (await second.used(MINE)).last_minute_s == 2.0
    async with second.taken(MINE, 2):
        pass


async def test_a_report_that_fails_is_repeated(pair: Pair, line: Line) -> None:
    """The keeper would count the picture as under way until the key comes to this replica again."""
    first, second = pair
    line.error = RuntimeError("unexpected")
    async with first.taken(MINE, 2):
        await settle(first)
        line.is_away = True
    async with asyncio.timeout(PATIENCE_S):
        while not line.calls["lost"]:
            await asyncio.sleep(0.001)
    line.is_away = False
    await settle(first)
    async with second.taken(MINE, 2):
        pass


@pytest.mark.parametrize("error", [ActorDiedError(), ObjectLostError("ref", None, "")])
async def test_a_call_that_is_lost_is_repeated(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(deployed_keeper, "RETRY_S", 0.0)
    errors, balance = [error], Balance(since=0, num_requests=1, gpu_s=2.0)

    async def report(*args: Any) -> dict[str, Balance]:
        if errors:
            raise errors.pop()
        return {MINE: balance}

    handle: Any = SimpleNamespace(report=SimpleNamespace(remote=report))
    assert await deployed_keeper.DeployedKeeper(handle).report("first", {}) == {MINE: balance}


async def test_a_fault_of_the_keeper_is_raised() -> None:
    async def report(*args: Any) -> None:
        raise RayTaskError("report", "", KeyError("key")).as_instanceof_cause()  # type: ignore[no-untyped-call]

    handle: Any = SimpleNamespace(report=SimpleNamespace(remote=report))
    with pytest.raises(KeyError):
        await deployed_keeper.DeployedKeeper(handle).report("first", {})


async def test_who_leaves_before_the_answer_holds_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "GRACE_S", 60.0)
    first, second = pair

    async def ask() -> None:
        async with second.taken(MINE, 2):
            raise AssertionError("there is no room")

    async with first.taken(MINE, 2):
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    async with second.taken(MINE, 2):
        pass
