"""Durable jobs behind one door: what the API calls, with the runner inside."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from deployments.asyncio_tools import cancel
from deployments.clips.attempt import Attempt
from deployments.clips.claims import Claim, Claims
from deployments.clips.database import open_database
from deployments.clips.errors import TooManyJobsError
from deployments.clips.folders import JobFolders, Variant
from deployments.clips.records import Job
from deployments.clips.runner import JobRunner
from deployments.clips.settings import JobSettings
from deployments.clips.store import JobStore
from deployments.studio.interface import Studio
from pipelines.request import MediaRequest

logger = logging.getLogger("troupe.jobs")

SWEEP_EVERY_S = 60.0


class Jobs:
    """Clips that are made in the background. Between ``start`` and ``stop``, queued jobs run.

    Several of these, in several processes, may share one database and one data directory: each job is run by one.
    """

    def __init__(self, studio: Studio, settings: JobSettings) -> None:
        self._studio = studio
        self._settings = settings
        self._folders = JobFolders(root=settings.data_dir / "videos")
        self._engine: AsyncEngine | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the database and go on with what was left unfinished. ValueError for a bad database URL."""
        self._engine = await open_database(self._settings.url)
        self._store = JobStore(engine=self._engine)
        claims = Claims(store=self._store, lease_s=self._settings.lease_s)

        def attempt(claim: Claim) -> Attempt:
            return Attempt(
                studio=self._studio, claims=claims, folders=self._folders, settings=self._settings, claim=claim
            )

        limits = self._settings
        self._runner = JobRunner(
            self._studio, claims, attempt, max_running=limits.max_concurrent_videos, poll_s=limits.poll_s
        )
        self._tasks = [asyncio.create_task(self._runner.run())]
        if limits.keep_videos_s is not None:
            self._tasks.append(asyncio.create_task(self._sweep(limits.keep_videos_s)))

    async def stop(self) -> None:
        """Stop running jobs; they are queued again, with nothing lost but the steps they had made."""
        await cancel(*self._tasks)
        if self._engine is not None:
            await self._engine.dispose()

    async def submit(self, request: MediaRequest, seconds: str) -> Job:
        """Queue a job. TooManyJobsError if too many wait."""
        num_waiting = await self._store.num_waiting()
        if num_waiting >= self._settings.max_waiting_videos:
            raise TooManyJobsError(num_waiting, retry_after_s=self._settings.lease_s)
        job = await self._store.create(request, seconds)
        self._runner.wake()
        return job

    async def get(self, job_id: str) -> Job | None:
        return await self._store.get(job_id)

    async def page(self, *, after: Job | None, limit: int, ascending: bool) -> tuple[list[Job], bool]:
        """Up to ``limit`` jobs behind ``after``, and whether there are more."""
        jobs = await self._store.page(after=after, limit=limit + 1, ascending=ascending)
        return jobs[:limit], len(jobs) > limit

    async def delete(self, job_id: str) -> bool:
        """Stop the job and delete all of it. Whether there was one."""
        found = await self._store.delete(job_id)
        await self._runner.stop_job(job_id)
        await asyncio.to_thread(self._folders.remove, job_id)
        return found

    def file(self, job_id: str, variant: Variant) -> Path:
        """Where a file of the job lies, once it is there."""
        return self._folders.path(job_id, variant)

    async def _sweep(self, keep_s: float) -> None:
        while True:
            try:
                for job_id in await self._store.finished_before(time.time() - keep_s):
                    await self.delete(job_id)
            except Exception:
                logger.exception("old jobs could not be deleted")
            await asyncio.sleep(min(SWEEP_EVERY_S, keep_s))
