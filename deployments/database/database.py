"""The database as one object: its URL, its engine, and what its failures are called."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
from sqlalchemy import URL, ColumnElement, Connection, Dialect, Executable, Row, ScalarSelect, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import AdaptedConnection, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import InstrumentedAttribute

from deployments.asyncio_tools import finish
from deployments.clips.storage import StorageFullError, StorageLostError, is_full
from deployments.database.schema import prepare
from deployments.database.tables import Base
from deployments.places import make_private_file

T = TypeVar("T")
SQLITE_PRAGMAS = ("busy_timeout = 30000", "synchronous = FULL", "journal_mode = WAL")
"""Writers wait for each other, commits survive a power cut, and readers do not wait for the writer."""
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
"""Asynchronous drivers by the scheme of a URL that names none."""
CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 30.0
"""The same time as ``busy_timeout`` of SQLite."""
PRIMARY_CODE = 0xFF
"""Bits of SQLite's error codes that other ones of the same kind share, such as SQLITE_BUSY_RECOVERY's."""
RETRY_LOCKED_S = 0.02
"""Seconds between attempts to set up a connection to a locked database."""
POSTGRES_OPTIONS = {"timeout": CONNECT_TIMEOUT_S, "command_timeout": COMMAND_TIMEOUT_S}
ROWS_AT_A_TIME = 64
"""Rows that SQLite's thread hands over together, as in ``aiosqlite.connect``."""


class Database:
    """The database at ``url``, between ``open`` and ``close``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: AsyncEngine | None = None

    @property
    def engine(self) -> AsyncEngine:
        """The engine. StorageLostError before ``open``."""
        if self._engine is None:
            raise StorageLostError("the database is not open yet")
        return self._engine

    async def open(self) -> None:
        """Open it. ValueError for a URL that cannot be used."""
        self._engine = await open_database(self._url)

    async def close(self) -> None:
        """Close all connections. Later calls open new ones."""
        if self._engine is not None:
            await self._engine.dispose()


def database_url(text: str) -> URL:
    """Return ``text`` with an asynchronous driver. ValueError if it is no URL of a database."""
    allowed = "it must be such as postgresql://user@host/name or sqlite:////folder/jobs.sqlite3"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError(f"the database is no URL; {allowed}") from None
    url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
    if url.get_backend_name() not in DRIVERS:
        raise ValueError(f"the database is of the kind {url.drivername!r}; {allowed}")
    return url


def insert_into(table: type[Base], engine: AsyncEngine) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT that can update the row that is there (``on_conflict_do_update``)."""
    return postgresql.insert(table) if engine.dialect.name == "postgresql" else sqlite.insert(table)


def first_free(key: InstrumentedAttribute[T], *conditions: ColumnElement[bool], by: Any = None) -> ScalarSelect[T]:
    """Return the ``key`` of the first row that fulfils ``conditions``, in the order ``by``, then of ``key``.

    It is for an UPDATE that takes this row. SQLite has one writer at a time; PostgreSQL hands each of several takers
    another row, and none waits.
    """
    first = select(key).where(*conditions).order_by(*((key,) if by is None else (by, key))).limit(1)
    return first.with_for_update(skip_locked=True).scalar_subquery()


async def lock_until_end(connection: AsyncConnection, lock: str) -> None:
    """Let transactions with the same ``lock`` write one after the other.

    PostgreSQL needs that for those that write depending on what others write; SQLite has one writer at a time.
    """
    if connection.dialect.name == "postgresql":
        await connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(lock, 0))))


async def row_of(engine: AsyncEngine, statement: Executable, lock: str | None = None) -> Row[Any] | None:
    """Execute a statement with RETURNING, and return its row; None if it has none.

    Statements with the same ``lock`` run one after the other.
    It is not cut short: a connection that is cancelled while it reads such a row keeps SQLite's lock.
    """

    async def execute() -> Row[Any] | None:
        async with engine.begin() as connection:
            if lock is not None:
                await lock_until_end(connection, lock)
            row: Row[Any] | None = (await connection.execute(statement)).one_or_none()
            return row

    return await finish(execute())


async def open_database(text: str) -> AsyncEngine:
    """Return an engine whose tables are those of this version. ValueError for a URL that cannot be used.

    The engine raises StorageFullError on a full disk, and StorageLostError if its server does not answer. It also
    raises the latter once its file was deleted or replaced, where SQLite would go on writing to the unlinked file.
    """
    url = database_url(text)
    if url.get_backend_name() == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        make_private_file(Path(url.database))  # SQLite gives its other files the permissions of this one
    engine = _create_engine(url)
    event.listen(engine.sync_engine, "do_connect", _connect)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _set_pragmas)
    async with engine.begin() as connection:
        await connection.run_sync(prepare)
    event.listen(engine.sync_engine, "handle_error", _name_failure)
    if engine.dialect.name == "sqlite" and url.database:
        # At "checkout" a failure would end the connection, and a cancellation meanwhile might never finish.
        event.listen(engine.sync_engine, "begin", _DatabaseFile(Path(url.database)).check)
    return engine


class SQLiteConnection(aiosqlite.Connection):
    """A connection that may be stopped while it closes, as SQLAlchemy does when a call is cancelled twice.

    aiosqlite's own would then wait for ever for a second stop, which its thread never reads.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(partial(sqlite3.connect, *args, **options), iter_chunk_size=ROWS_AT_A_TIME)
        self._thread.daemon = True  # as SQLAlchemy makes that of its own connections
        self._is_stopped = False

    def stop(self) -> asyncio.Future[Any] | None:
        """End the thread, and return what is done then; None if it was stopped before."""
        if self._is_stopped:
            return None
        self._is_stopped = True
        return super().stop()


def _create_engine(url: URL) -> AsyncEngine:
    options = POSTGRES_OPTIONS if url.drivername == DRIVERS["postgresql"] else {"async_creator_fn": SQLiteConnection}
    try:  # parameters, which errors would tell the log, hold prompts and secrets
        return create_async_engine(url, pool_pre_ping=True, connect_args=options, hide_parameters=True)
    except ModuleNotFoundError as error:
        extra = "pip install '.[postgres]'" if error.name == "asyncpg" else f"install {error.name}"
        raise ValueError(f"the database is {url.get_backend_name()}, whose driver is not installed: {extra}") from None


def _connect(dialect: Dialect, _record: Any, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Connect. StorageLostError if the server cannot be reached: drivers raise OSError, which may mean anything."""
    try:
        return dialect.connect(*arguments, **options)
    except OSError as error:
        place = f"{options.get('host', 'its socket')}:{options.get('port', '')}".rstrip(":")
        raise StorageLostError(f"the database at {place} does not answer ({type(error).__name__})") from error
    except Exception as error:  # asyncpg's own: SQLAlchemy gives a kind only to those that come later
        if type(error).__module__.startswith("asyncpg"):
            raise StorageLostError(f"the database refuses connections: {error}") from error
        raise


def _set_pragmas(connection: AdaptedConnection, record: Any) -> None:
    connection.run_async(_execute_pragmas)


async def _execute_pragmas(connection: aiosqlite.Connection) -> None:
    """Execute all pragmas, and try again for ``COMMAND_TIMEOUT_S`` while the database is locked.

    ``busy_timeout`` does not suffice. The journal mode of a new database cannot change beside a writer, and SQLite
    refuses that at once, to avoid a deadlock.
    """
    end_s = time.monotonic() + COMMAND_TIMEOUT_S
    for pragma in SQLITE_PRAGMAS:
        while True:
            try:
                await connection.execute_fetchall(f"PRAGMA {pragma}")
                break
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & PRIMARY_CODE == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > end_s:
                    raise
            await asyncio.sleep(RETRY_LOCKED_S)


def _name_failure(context: ExceptionContext) -> None:
    """Raise what a full disk, or a server that does not answer in time, is called here."""
    failure = context.original_exception
    if isinstance(failure, TimeoutError):  # of asyncpg: SQLAlchemy gives it no kind
        raise StorageLostError("the database does not answer in time") from failure
    if "disk is full" in str(failure) or is_full(failure):
        raise StorageFullError(f"the database has no room: {failure}") from failure


class _DatabaseFile:
    """The file at ``path``. Once lost it stays lost: its inode may be reused."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._is_lost = path, _place(path), False

    def check(self, _connection: Connection) -> None:
        self._is_lost = self._is_lost or _place(self._path) != self._place
        if self._is_lost:
            raise StorageLostError(f"the database {self._path} was deleted or replaced under the server: restart it")


def _place(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:  # a database in memory
        return None
    return stat.st_dev, stat.st_ino
