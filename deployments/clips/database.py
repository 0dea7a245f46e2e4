"""The engine behind the clip records, and what SQLite is told to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

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


def _tell_sqlite(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in SQLITE_PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
