"""Usage of keys is in the database: over restarts, through all replicas, and once each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import func, select

from deployments.clips.storage import StorageLostError
from deployments.database.database import Database
from deployments.database.tables import UsageRow
from deployments.usage import ledger as ledgers
from deployments.usage.accounts import Accounts
from deployments.usage.ledger import UsageLedger
from tests.deployments.usage.conftest import MINE, OTHER
from tests.support.patience import PATIENCE_S


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    await database.open()
    yield database
    await database.close()


def accounts_in(database: Database) -> Accounts:
    accounts = Accounts()
    accounts.ledger = UsageLedger(database)
    return accounts


async def flush(accounts: Accounts) -> None:
    assert accounts.ledger is not None
    await accounts.ledger.flush()


async def test_use_is_that_of_all_replicas_and_outlives_them(database: Database) -> None:
    first, second = accounts_in(database), accounts_in(database)
    for accounts, gpu_s in ((first, 1.5), (second, 2.0), (first, 0.25)):
        accounts.charge(MINE, "m", gpu_s)
    second.charge(OTHER, "m", 8.0, is_finished=False)
    await asyncio.gather(flush(first), flush(second))
    for accounts in (first, second, accounts_in(database)):
        balance = await accounts.used(MINE)
        assert (balance.num_requests, balance.gpu_s) == (3, 3.75)
    assert (await first.used(OTHER)).gpu_s == 8.0
    assert (await first.used("nobody")).num_requests == 0


async def test_what_is_used_is_written_without_being_asked(database: Database) -> None:
    accounts, later = accounts_in(database), accounts_in(database)
    for _ in range(5):
        accounts.charge(MINE, "m", 1.0)
    async with asyncio.timeout(PATIENCE_S):
        while (await later.used(MINE)).num_requests < 5:
            await asyncio.sleep(0.01)


async def test_a_write_that_fails_is_repeated_and_counts_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if it had been made, and only its answer was lost."""
    monkeypatch.setattr(ledgers, "RETRY_S", 0.01)
    accounts, failures, write = accounts_in(database), 2, UsageLedger._write

    async def fails(ledger: UsageLedger, rows: object) -> None:
        nonlocal failures
        await write(ledger, rows)  # type: ignore[arg-type]
        if failures:
            failures -= 1
            raise StorageLostError("away")

    monkeypatch.setattr(UsageLedger, "_write", fails)
    accounts.charge(MINE, "m", 1.0)
    async with asyncio.timeout(PATIENCE_S):
        while failures:
            await asyncio.sleep(0.01)
    accounts.charge(MINE, "m", 1.0)
    await flush(accounts)
    async with database.engine.connect() as connection:
        assert await connection.scalar(select(func.sum(UsageRow.gpu_s))) == 2.0
