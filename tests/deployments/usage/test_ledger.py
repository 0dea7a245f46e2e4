"""Usage of keys is in the database: over restarts, through all replicas, and once each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from sqlalchemy import event, func, insert, select

from deployments.clips.storage import StorageLostError
from deployments.database.database import Database
from deployments.database.tables import UsageRow
from deployments.usage import ledger as ledgers
from deployments.usage.accounts import Accounts
from deployments.usage.ledger import ENDED_AFTER_S, TOTAL, UsageLedger
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


async def written(accounts: Accounts) -> None:
    """Return once the ledger has written what was charged."""
    assert accounts.ledger is not None
    assert accounts.ledger._writing is not None
    await accounts.ledger._writing


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


async def rows_of_mine(database: Database) -> list[tuple[float, int, bool]]:
    """Return GPU-seconds, beginning and whether it is a replica's own, of all rows of MINE."""
    query = select(UsageRow.gpu_s, UsageRow.since, UsageRow.replica != TOTAL).where(UsageRow.key_hash == MINE)
    async with database.engine.connect() as connection:
        return sorted((gpu_s, since, is_own) for gpu_s, since, is_own in await connection.execute(query))


async def killed(database: Database, *amounts_s: float, age_s: float) -> None:
    """Leave rows of replicas that began ``age_s`` ago and were killed after their writes."""
    since = int(time.time() - age_s)
    row = {"key_hash": MINE, "since": since, "num_requests": 1}
    values = [{**row, "replica": uuid4().hex, "gpu_s": gpu_s} for gpu_s in amounts_s]
    async with database.engine.begin() as connection:
        await connection.execute(insert(UsageRow), values)


async def test_replicas_that_end_leave_one_row_a_key(database: Database) -> None:
    for _ in range(3):
        accounts = accounts_in(database)
        accounts.charge(MINE, "m", 1.5)
        await flush(accounts)
        await flush(accounts)
    ((gpu_s, _, is_own),) = await rows_of_mine(database)
    assert (gpu_s, is_own) == (4.5, False)
    assert (await accounts.used(MINE)).num_requests == 3


async def test_rows_of_killed_replicas_are_merged_once_by_several(database: Database) -> None:
    """Rows of a replica that may be alive stay."""
    await killed(database, *(2.0**n for n in range(12)), age_s=ENDED_AFTER_S + 10)
    await killed(database, 0.5, age_s=ENDED_AFTER_S - 600)
    others = [accounts_in(database) for _ in range(4)]
    for accounts in others:
        accounts.charge(OTHER, "m", 1.0)
    await asyncio.gather(*(flush(accounts) for accounts in others))
    (young, *_), (merged, since, is_own) = await rows_of_mine(database)
    assert (young, merged, is_own) == (0.5, 2.0**12 - 1, False)
    assert since <= time.time() - ENDED_AFTER_S
    assert (await others[0].used(OTHER)).gpu_s == 4.0


async def test_a_merge_that_is_killed_halfway_loses_nothing(database: Database) -> None:
    await killed(database, 1.0, 2.0, age_s=ENDED_AFTER_S + 10)
    statements: list[str] = []

    def die(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement.split()[0])
        if statements[-2:] == ["DELETE", "INSERT"]:
            raise StorageLostError("killed")

    event.listen(database.engine.sync_engine, "before_cursor_execute", die)
    accounts = accounts_in(database)
    accounts.charge(MINE, "m", 4.0)
    await flush(accounts)
    event.remove(database.engine.sync_engine, "before_cursor_execute", die)
    assert statements[-2:] == ["DELETE", "INSERT"]
    assert [(gpu_s, is_own) for gpu_s, _, is_own in await rows_of_mine(database)] == [
        (1.0, True),
        (2.0, True),
        (4.0, True),
    ]
    await flush(accounts)
    assert [(gpu_s, is_own) for gpu_s, _, is_own in await rows_of_mine(database)] == [(7.0, False)]


async def test_a_replica_that_lives_on_begins_new_rows(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may merge those of a replica that was idle for long."""
    accounts, reader = accounts_in(database), accounts_in(database)
    for n in range(1, 4):
        monkeypatch.setattr(ledgers, "ROTATE_S", 0)
        accounts.charge(MINE, "m", 1.0)
        monkeypatch.setattr(ledgers, "ROTATE_S", 3600)
        accounts.charge(MINE, "m", 1.0)
        await written(accounts)
        for replica in (accounts, reader):
            assert (await replica.used(MINE)).gpu_s == 2.0 * n
        assert len(await rows_of_mine(database)) == min(n, 2)
    monkeypatch.setattr(ledgers, "ENDED_AFTER_S", -10)
    reader.charge(OTHER, "m", 1.0)
    await written(reader)
    monkeypatch.setattr(ledgers, "ROTATE_S", 0)
    assert (await accounts.used(MINE)).gpu_s == 6.0
    accounts.charge(MINE, "m", 1.0)
    await written(accounts)
    assert (await reader.used(MINE)).gpu_s == 7.0
