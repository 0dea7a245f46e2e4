"""Job records in an SQL database: made, read, listed, deleted. Who may run them is decided in ``claims``."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from deployments.clips.records import Job, JobRow, job_of, to_json
from pipelines.request import MediaRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStore:
    engine: AsyncEngine

    def session(self) -> AsyncSession:
        return AsyncSession(self.engine, expire_on_commit=False)

    async def create(self, request: MediaRequest, seconds: str) -> Job:
        """A queued job, on disk when this returns."""
        row = JobRow(
            id=f"video_{secrets.token_hex(16)}",
            model=request.model,
            request_json=to_json(request),
            seconds=seconds,
            status="queued",
            created_at_s=time.time(),
        )
        async with self.session() as session, session.begin():
            session.add(row)
        return await self._must_get(row.id)

    async def get(self, job_id: str) -> Job | None:
        async with self.session() as session:
            row = await session.scalar(select(JobRow).where(JobRow.id == job_id))
        return None if row is None else job_of(row)

    async def page(self, *, after: Job | None, limit: int, ascending: bool) -> list[Job]:
        """Up to ``limit`` jobs behind ``after`` in order of creation, the newest first unless ``ascending``."""
        query = select(JobRow).order_by(JobRow.number if ascending else JobRow.number.desc()).limit(limit)
        if after is not None:
            query = query.where(JobRow.number > after.number if ascending else JobRow.number < after.number)
        async with self.session() as session:
            return [job_of(row) for row in await session.scalars(query)]

    async def delete(self, job_id: str) -> bool:
        """Whether there was such a job. A runner that works on it learns of it with its next report."""
        async with self.session() as session, session.begin():
            row = await session.scalar(select(JobRow).where(JobRow.id == job_id))
            await session.execute(delete(JobRow).where(JobRow.id == job_id))
        return row is not None

    async def num_waiting(self) -> int:
        query = select(func.count()).select_from(JobRow).where(JobRow.status == "queued")
        async with self.session() as session:
            return await session.scalar(query) or 0

    async def finished_before(self, time_s: float) -> list[str]:
        """Ids of the jobs that were completed or failed before ``time_s``."""
        async with self.session() as session:
            return list(await session.scalars(select(JobRow.id).where(JobRow.completed_at_s < time_s)))

    async def _must_get(self, job_id: str) -> Job:
        job = await self.get(job_id)
        assert job is not None
        return job
