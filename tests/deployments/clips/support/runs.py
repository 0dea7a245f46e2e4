"""Clips that are made, quickly, in the background of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.clips.clips import Clips
from deployments.clips.records import ClipRecord
from deployments.clips.settings import ClipSettings
from tests.deployments.clips.test_claims import REQUEST as BASE
from tests.deployments.support.fake_studio import FakeStudio
from tests.support.patience import PATIENCE_S

REQUEST = replace(BASE, model="fake-clips", seed=77)
QUICK: dict[str, Any] = {"poll_s": 0.05, "progress_s": 0.02, "retry_s": 0.02, "lease_s": 10.0}


@asynccontextmanager
async def running(studio: FakeStudio, folder: Path, **settings: Any) -> AsyncIterator[Clips]:
    clips = Clips(studio, ClipSettings(data_dir=folder, **(QUICK | settings)))
    await clips.start()
    try:
        yield clips
    finally:
        await clips.stop()


async def the(clips: Clips, clip_id: str) -> ClipRecord:
    """Returns the clip, which is there."""
    record = await clips.get(clip_id)
    assert record is not None
    return record


async def ended(clips: Clips, clip_id: str) -> ClipRecord:
    async with asyncio.timeout(PATIENCE_S):
        while (record := await the(clips, clip_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return record


async def started(studio: FakeStudio, num_clips: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(studio.performed) < num_clips:
            await asyncio.sleep(0.01)
