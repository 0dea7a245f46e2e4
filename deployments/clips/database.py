"""The SQLAlchemy engine of clip records, and the pragmas of SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateColumn

from deployments.clips.records import Base
from deployments.clips.storage import StorageFullError, StorageLostError, is_full
from deployments.places import make_private_file

SQLITE_PRAGMAS = ("journal_mode = WAL", "busy_timeout = 30000", "synchronous = FULL")
"""Readers do not wait for the writer, writers wait for each other, and what was committed survives a power cut."""
NUM_TRIES = 5
"""Replicas that create the tables at the same moment collide and retry."""


async def open_database(url: str) -> AsyncEngine:
    """Return an engine and create the tables. ValueError if async SQLAlchemy cannot use ``url``.

    The engine raises StorageFullError on a full disk, and StorageLostError once its file was deleted or replaced:
    SQLite would go on writing to the unlinked file.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        make_private_file(Path(parsed.database))  # SQLite gives its other files the permissions of this one
    engine = create_async_engine(parsed, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _set_pragmas)
    for try_number in range(1, NUM_TRIES + 1):
        try:
            await _create_tables(engine)
            break
        except DBAPIError:
            if try_number == NUM_TRIES:
                raise
    event.listen(engine.sync_engine, "handle_error", _name_full_disk)
    if engine.dialect.name == "sqlite" and parsed.database:
        # At "checkout" a failure would end the connection, and one that is cancelled meanwhile may never be over.
        event.listen(engine.sync_engine, "begin", _DatabaseFile(Path(parsed.database)).check)
    return engine


async def _create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.run_sync(_add_columns)


def _add_columns(connection: Connection) -> None:
    """Add the columns that a database of an earlier version lacks. Old rows get the default."""
    for table in Base.metadata.sorted_tables:
        names = {column["name"] for column in inspect(connection).get_columns(table.name)}
        for column in table.columns:
            if column.name not in names:
                assert column.nullable or column.server_default is not None, "old rows need a value"
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))


def _set_pragmas(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in SQLITE_PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _name_full_disk(context: ExceptionContext) -> None:
    failure = context.original_exception
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
