"""A database of an earlier version is one of this version after a start, and one that is lost ends no connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import event, text

from deployments.clips.database import ClipError, open_database
from deployments.clips.storage import StorageLostError
from deployments.clips.store import ClipStore
from tests.deployments.clips.test_claims import REQUEST


async def test_clips_from_before_there_were_keys_are_kept(database_url: str) -> None:
    engine = await open_database(database_url)
    before = await ClipStore(engine=engine).create(REQUEST, "1")
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE troupe_jobs DROP COLUMN key_hash"))
    await engine.dispose()
    engines = await asyncio.gather(*(open_database(database_url) for _ in range(3)))  # replicas that start at once
    store = ClipStore(engine=engines[0])
    after = await store.create(REQUEST, "1", "hash")
    assert await store.get(before.id) == before
    assert [clip.key_hash for clip in await store.page(after=None, limit=9, ascending=True)] == ["", "hash"]
    assert await store.page(after=None, limit=9, ascending=True, key_hash="hash") == [after]
    async with engines[0].begin() as connection:  # a replica of the earlier version, still running
        columns = "id, model, request_json, seconds, status, progress, num_previews, attempts, created_at_s, owner"
        columns += ", lease_until_s, not_before_s"
        await connection.execute(
            text(f"INSERT INTO troupe_jobs ({columns}) SELECT 'other', {columns[4:]} FROM troupe_jobs WHERE id = :id"),
            {"id": before.id},
        )
    other = await store.get("other")
    assert other is not None
    assert other.key_hash == ""
    for engine in engines:
        await engine.dispose()


FAILED = ClipError(code="any", message="any")


async def test_a_lost_database_ends_no_connection(tmp_path: Path) -> None:
    """What is cancelled while SQLAlchemy ends an aiosqlite connection may never be over."""
    engine = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'jobs.sqlite3'}")
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
