"""Make clips quickly in the background of a test."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from deployments.clips.clips import Clips
from deployments.clips.database import ClipError, ClipRecord
from deployments.clips.settings import DATABASE, ClipSettings
from deployments.clips.storage import Variant
from deployments.database.schema import prepare
from tests.deployments.clips.test_claims import REQUEST as BASE
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

REQUEST = replace(BASE, model="fake-clips", seed=77)
QUICK: dict[str, Any] = {"poll_s": 0.05, "progress_s": 0.02, "retry_s": 0.02, "lease_s": 3600.0}
"""Claims last: a process that is paused for a while still holds its clips."""


def with_tables(folder: Path) -> Path:
    """Put a database with all tables into ``folder``, if it has none, and return the folder.

    A copy takes a third of the time of its 30 statements. ``test_database.py`` makes new ones.
    """
    file = folder / DATABASE
    if folder.is_dir() and not file.exists():
        file.write_bytes(_tables())
    return folder


@cache
def _tables() -> bytes:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        prepare(connection)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        return driver.serialize()


@asynccontextmanager
async def running(service: FakeService, folder: Path, **settings: Any) -> AsyncIterator[Clips]:
    clips = Clips(service, ClipSettings(data_dir=with_tables(folder), **(QUICK | settings)))
    await clips.start()
    try:
        yield clips
    finally:
        await clips.stop()


class Looking(FakeService):
    """Counts how often its runner looks for a clip."""

    num_looks = 0

    async def not_ready(self, max_age_s: float = 0.0) -> Mapping[str, str]:
        self.num_looks += 1
        return await super().not_ready(max_age_s)

    async def looked(self) -> None:
        """Wait for two more looks: the current one, and one that saw the present state."""
        num_looks = self.num_looks
        async with asyncio.timeout(PATIENCE_S):
            while self.num_looks < num_looks + 2:
                await asyncio.sleep(0.01)


async def the(clips: Clips, clip_id: str) -> ClipRecord:
    """Return the clip, which must exist."""
    record = await clips.get(clip_id)
    assert record is not None
    return record


async def data_of(clips: Clips, clip_id: str, variant: Variant = "video") -> bytes:
    """Return the content of the clip's file, which must exist."""
    path = await clips.file(clip_id, variant)
    assert path is not None
    return path.read_bytes()


def failure_of(record: ClipRecord) -> ClipError:
    """Return the error of a failed clip."""
    assert record.error is not None
    return record.error


async def ended(clips: Clips, clip_id: str) -> ClipRecord:
    async with asyncio.timeout(PATIENCE_S):
        while (record := await the(clips, clip_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return record


async def started(service: FakeService, num_clips: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(service.performed) < num_clips:
            await asyncio.sleep(0.01)


async def problem_now(clips: Clips) -> Exception | None:
    """Return what a new look at the storage says: one that is under way may have seen the state before."""
    await clips.storage_problem()
    return await clips.storage_problem()
