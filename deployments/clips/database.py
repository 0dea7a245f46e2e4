"""The engine behind the clip records, and what SQLite is told to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateColumn

from deployments.clips.records import Base

SQLITE_PRAGMAS = ("journal_mode = WAL", "busy_timeout = 30000", "synchronous = FULL")
"""Readers do not wait for the writer, writers wait for each other, and what was committed survives a power cut."""


async def open_database(url: str) -> AsyncEngine:
    """Returns an engine, with the tables there. ValueError if ``url`` is not one that async SQLAlchemy can use."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(parsed, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _tell_sqlite)
    try:
        await _create_tables(engine)
    except DBAPIError:
        await _create_tables(engine)  # another replica made them at the same moment
    return engine


async def _create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.run_sync(_add_columns)


def _add_columns(connection: Connection) -> None:
    """Adds what a database of an earlier version lacks. Its rows get the default."""
    for table in Base.metadata.sorted_tables:
        names = {column["name"] for column in inspect(connection).get_columns(table.name)}
        for column in table.columns:
            if column.name not in names:
                assert column.nullable or column.server_default is not None, "old rows need a value"
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))


def _tell_sqlite(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in SQLITE_PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
