"""Durable clips behind one door: what the API calls, with the runner inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from deployments.asyncio_tools import cancel
from deployments.clips.attempt import Attempt
from deployments.clips.claims import Claim, Claims
from deployments.clips.database import open_database
from deployments.clips.folders import ClipFolders, Variant
from deployments.clips.records import ClipRecord
from deployments.clips.runner import ClipRunner
from deployments.clips.settings import ClipSettings
from deployments.clips.store import ClipStore
from deployments.studio.interface import Studio
from engines.gang.errors import QueueFullError
from pipelines.request import MediaRequest

logger = logging.getLogger("troupe.clips")

SWEEP_EVERY_S = 60.0


class Clips:
    """Clips that are made in the background, between ``start`` and ``stop``.

    Several of these, in several processes, may share one database and one data directory: each clip is made by one.
    """

    def __init__(self, studio: Studio, settings: ClipSettings) -> None:
        self._studio = studio
        self._settings = settings
        self._folders = ClipFolders(root=settings.data_dir / "videos")
        self._engine: AsyncEngine | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the database and goes on with what was left unfinished. ValueError for a bad database URL."""
        self._engine = await open_database(self._settings.url)
        self._store = ClipStore(engine=self._engine)
        claims = Claims(store=self._store, lease_s=self._settings.lease_s)

        def attempt(claim: Claim) -> Attempt:
            return Attempt(
                studio=self._studio, claims=claims, folders=self._folders, settings=self._settings, claim=claim
            )

        limits = self._settings
        self._runner = ClipRunner(
            self._studio, claims, attempt, max_running=limits.max_concurrent_videos, poll_s=limits.poll_s
        )
        self._tasks = [asyncio.create_task(self._runner.run())]
        if limits.keep_videos_s is not None:
            self._tasks.append(asyncio.create_task(self._sweep(limits.keep_videos_s)))

    async def stop(self) -> None:
        """Stops the clips that are being made; they are queued again, with nothing lost but the steps they had made."""
        await cancel(*self._tasks)
        if self._engine is not None:
            await self._engine.dispose()

    async def submit(self, request: MediaRequest, seconds: str, key_hash: str = "") -> ClipRecord:
        """Queues a clip, for the holder of a key. QueueFullError if too many wait, whatever room the gangs have."""
        num_waiting = await self._store.num_waiting()
        if num_waiting >= self._settings.max_waiting_videos:
            raise QueueFullError(num_waiting, retry_after_s=self._settings.lease_s)
        clip = await self._store.create(request, seconds, key_hash)
        self._runner.wake()
        return clip

    async def get(self, clip_id: str) -> ClipRecord | None:
        return await self._store.get(clip_id)

    async def get_all(self, clip_ids: Collection[str]) -> dict[str, ClipRecord]:
        """Returns those of the clips that there are, by id."""
        return await self._store.get_all(clip_ids)

    async def page(
        self, *, after: ClipRecord | None, limit: int, ascending: bool, key_hash: str | None = None
    ) -> tuple[list[ClipRecord], bool]:
        """Returns up to ``limit`` clips behind ``after``, of one key unless it is None, and whether there are more."""
        clips = await self._store.page(after=after, limit=limit + 1, ascending=ascending, key_hash=key_hash)
        return clips[:limit], len(clips) > limit

    async def delete(self, clip_id: str) -> bool:
        """Stops the clip and deletes all of it. Returns whether there was one."""
        was_there = await self._store.delete(clip_id)
        await self._runner.stop_clip(clip_id)
        await asyncio.to_thread(self._folders.remove, clip_id)
        return was_there

    def file(self, clip_id: str, variant: Variant) -> Path:
        """Returns where a file of the clip lies, once it is there."""
        return self._folders.path(clip_id, variant)

    async def _sweep(self, keep_s: float) -> None:
        while True:
            try:
                for clip_id in await self._store.finished_before(time.time() - keep_s):
                    await self.delete(clip_id)
            except Exception:
                logger.exception("old clips could not be deleted")
            await asyncio.sleep(min(SWEEP_EVERY_S, keep_s))
