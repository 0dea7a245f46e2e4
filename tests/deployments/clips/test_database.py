"""A start upgrades a database of an earlier version, and a lost database ends no connection."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from deployments.clips.database import ClipError
from deployments.clips.storage import UNAVAILABLE, StorageLostError
from deployments.clips.store import Claims, ClipStore
from deployments.database import database
from deployments.database.database import (
    SQLITE_PRAGMAS,
    Database,
    SQLiteConnection,
    _execute_pragmas,
    database_url,
    open_database,
)
from deployments.database.schema import HEAD, MIGRATIONS
from deployments.database.tables import Base
from tests.deployments.clips.test_claims import REQUEST
from tests.deployments.support import postgresql as postgres
from tests.support.patience import PATIENCE_S

FIRST = """
    CREATE TABLE troupe_jobs (
        number {serial}, id VARCHAR(64) NOT NULL, model VARCHAR(512) NOT NULL, request_json TEXT NOT NULL,
        seconds VARCHAR(16) NOT NULL, status VARCHAR(16) NOT NULL, progress INTEGER NOT NULL,
        num_previews INTEGER NOT NULL, attempts INTEGER NOT NULL, created_at_s {real} NOT NULL,
        completed_at_s {real}, owner VARCHAR(64) NOT NULL, lease_until_s {real} NOT NULL,
        not_before_s {real} NOT NULL, error_json TEXT, timings_json TEXT,
        UNIQUE (id))
"""
"""The table of the first version."""
TYPES = {
    "sqlite": {"serial": "INTEGER PRIMARY KEY NOT NULL", "real": "FLOAT"},
    "postgresql": {"serial": "SERIAL PRIMARY KEY", "real": "DOUBLE PRECISION"},
}
COLUMNS = "model, request_json, seconds, status, progress, num_previews, attempts, created_at_s, owner"
COLUMNS += ", lease_until_s, not_before_s"


async def copy_row(engine: AsyncEngine, source: str, clip_id: str) -> None:
    """Write a row like a replica of the first version."""
    insert = f"INSERT INTO troupe_jobs (id, {COLUMNS}) SELECT '{clip_id}', {COLUMNS} FROM {source}"
    async with engine.begin() as connection:
        await connection.execute(text(insert))


async def as_the_first_version(engine: AsyncEngine) -> None:
    """Turn the database, which holds one clip, into one of the first version."""
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE before AS SELECT * FROM troupe_jobs"))
        for name in ("alembic_version", *(table.name for table in Base.metadata.sorted_tables)):
            await connection.execute(text(f"DROP TABLE {name}"))
        await connection.execute(text(FIRST.format(**TYPES[engine.dialect.name])))
        await connection.execute(text("CREATE INDEX ix_troupe_jobs_status ON troupe_jobs (status)"))


def differences(connection: Connection) -> list[object]:
    """Return the differences between the database and a new one."""
    found: list[object] = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    return found


async def test_a_database_of_the_first_version_is_migrated_and_its_clips_are_kept(database_url: str) -> None:
    engine = await open_database(database_url)
    before = await ClipStore(engine=engine).create(REQUEST, "1")
    await as_the_first_version(engine)
    await copy_row(engine, "before", before.id)
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE before"))
    await engine.dispose()
    engines = await asyncio.gather(*(open_database(database_url) for _ in range(3)))  # replicas that start at once
    async with engines[0].begin() as connection:
        assert await connection.run_sync(differences) == []
        assert await connection.scalar(text("SELECT version_num FROM alembic_version")) == HEAD
    store = ClipStore(engine=engines[0])
    after = await store.create(REQUEST, "1", "hash")
    assert await store.get(before.id) == replace(before, number=1)
    assert [clip.key_hash for clip in await store.page(after=None, limit=9, ascending=True)] == ["", "hash"]
    assert await store.page(after=None, limit=9, ascending=True, key_hash="hash") == [after]
    await copy_row(engines[0], f"troupe_jobs WHERE id = '{before.id}'", "other")  # a replica that still runs
    other = await store.get("other")
    assert other is not None
    assert other.key_hash == ""
    for engine in engines:
        await engine.dispose()


async def test_a_database_of_a_later_version_is_refused(database_url: str) -> None:
    engine = await open_database(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await engine.dispose()
    with pytest.raises(ValueError, match="the database has the schema 9999, which is later than"):
        await open_database(database_url)


async def test_a_database_that_another_process_recovers_is_waited_for() -> None:
    """SQLite reports it by a longer code than other locks."""
    connection = sqlite3.connect(":memory:")
    executed: list[str] = []

    class Recovered:
        async def execute_fetchall(self, statement: str) -> None:
            executed.append(statement)
            if len(executed) == 1:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
                raise error
            connection.execute(statement)

    await _execute_pragmas(Recovered())  # type: ignore[arg-type]
    assert executed == [f"PRAGMA {pragma}" for pragma in (SQLITE_PRAGMAS[0], *SQLITE_PRAGMAS)]
    connection.close()


def test_the_newest_revision_is_that_of_new_databases() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def test_urls_may_leave_the_driver_out() -> None:
    for given, driver in (("postgresql://h/n", "postgresql+asyncpg"), ("sqlite:////f", "sqlite+aiosqlite")):
        assert database_url(given).drivername == driver
    with pytest.raises(ValueError, match="of the kind 'mysql'; it must be such as postgresql"):
        database_url("mysql://h/n")
    with pytest.raises(ValueError, match="it must be such as postgresql://user@host/name"):
        database_url("/data/jobs.sqlite3")


async def test_errors_do_not_tell_what_was_written(database_url: str) -> None:
    """They are logged, and records hold prompts and the secrets of webhooks."""
    engine = await open_database(database_url)
    with pytest.raises(DBAPIError, match="parameters hidden") as caught:
        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO nowhere VALUES (:secret)"), {"secret": "whsec_hidden"})
    assert "whsec_hidden" not in str(caught.value)
    await engine.dispose()


async def test_a_server_that_is_away_is_unavailable() -> None:
    with pytest.raises(StorageLostError, match="not open yet"):
        _ = Database("sqlite://").engine
    for place in ("/name?host=/nowhere", "127.0.0.1:9/name"):
        with pytest.raises(StorageLostError, match="does not answer"):
            await open_database(f"postgresql://troupe@{place}")


async def test_connections_that_the_server_ended_are_replaced(postgresql: str) -> None:
    await postgres.empty(postgresql)
    engine, other = await open_database(postgresql), await open_database(postgresql)
    store = ClipStore(engine=engine)
    made = await store.create(REQUEST, "1")
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type"
    async with other.begin() as connection:
        await connection.execute(text(f"{others} = 'client backend'"))
    assert await store.get(made.id) == made
    for one in (engine, other):
        await one.dispose()


async def test_a_statement_that_takes_too_long_means_that_the_database_is_unavailable(
    postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver raises its own TimeoutError, at which background work would end."""
    monkeypatch.setitem(database.POSTGRES_OPTIONS, "command_timeout", 0.1)
    engine = await open_database(postgresql)
    try:
        with pytest.raises(UNAVAILABLE, match="does not answer"):
            async with engine.connect() as connection:
                await connection.execute(text(f"SELECT pg_sleep({PATIENCE_S})"))
    finally:
        await engine.dispose()


FAILED = ClipError(code="any", message="any")


async def test_a_lost_database_ends_no_connection(tmp_path: Path) -> None:
    """A task cancelled while SQLAlchemy ends an aiosqlite connection may never end."""
    engine = await open_database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    store, num_ended = ClipStore(engine=engine), 0

    def count(*_: object) -> None:
        nonlocal num_ended
        num_ended += 1

    for name in ("close", "invalidate"):
        event.listen(engine.sync_engine, name, count)
    for path in tmp_path.glob("jobs.sqlite3*"):
        path.unlink()
    for work in (store.get("any"), store.create(REQUEST, "1"), store.fail_completed("any", FAILED)):
        with pytest.raises(StorageLostError, match="deleted or replaced under the server"):
            await work
    assert num_ended == 0
    await engine.dispose()
    assert num_ended == 1, "one connection is what they all had"


async def test_a_cancelled_claim_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fetching, fetch = tmp_path / "jobs.sqlite3", asyncio.Event(), aiosqlite.Cursor.fetchall

    async def slowly(cursor: aiosqlite.Cursor) -> Any:
        fetching.set()
        await asyncio.sleep(0.05)
        return await fetch(cursor)

    engine = await open_database(f"sqlite:///{file}")
    store = ClipStore(engine=engine)
    clip = await store.create(REQUEST, "1")
    with monkeypatch.context() as patched:
        patched.setattr(aiosqlite.Cursor, "fetchall", slowly)
        taking = asyncio.create_task(Claims(store=store, lease_s=60).take([REQUEST.model]))
        await fetching.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    with closing(sqlite3.connect(file, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")
    found = await store.get(clip.id)
    assert found is not None
    assert found.attempts == 1, "the claim was written, whole"
    await engine.dispose()


async def test_a_connection_that_is_stopped_while_it_closes_ends(tmp_path: Path) -> None:
    """SQLAlchemy stops a connection whose graceful close is cancelled; only a closing loop waits for it."""
    engine = await open_database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    async with engine.connect() as borrowed:
        connection = (await borrowed.get_raw_connection()).driver_connection
        assert isinstance(connection, SQLiteConnection)
    await engine.dispose()
    connection = await SQLiteConnection(str(tmp_path / "other.sqlite3"))
    ending = asyncio.ensure_future(connection.close())
    await asyncio.sleep(0)
    connection.stop()
    async with asyncio.timeout(PATIENCE_S):
        await ending
