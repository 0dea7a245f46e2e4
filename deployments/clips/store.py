"""Clip records and claims in an SQL database."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Update, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from deployments.clips.database import OPEN, ClipError, ClipRecord, ClipStatus, record_of, to_json
from deployments.clips.eta import OpenClip, duration_key
from deployments.clips.webhooks import Webhook, delivery, webhook_json
from deployments.database.database import first_free, insert_into, row_of
from deployments.database.tables import ClipRow, DeliveryRow
from deployments.observability.metrics import CLIP_WAITS
from deployments.service.interface import StageTimes
from pipelines.request import MediaRequest

UNCLAIMED: Mapping[str, Any] = MappingProxyType({"status": "queued"})


def new_clip_id() -> str:
    return f"video_{secrets.token_hex(16)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipStore:
    engine: AsyncEngine
    """Connections to the database."""

    def session(self) -> AsyncSession:
        return AsyncSession(self.engine, expire_on_commit=False)

    async def create(
        self,
        request: MediaRequest,
        seconds: str,
        key_hash: str = "",
        clip_id: str | None = None,
        claim: Mapping[str, Any] = UNCLAIMED,
        webhook: Webhook | None = None,
    ) -> ClipRecord:
        """Insert and return a clip, queued unless ``claim`` has its columns, with a new id unless one is given."""
        row = ClipRow(
            id=clip_id or new_clip_id(),
            model=request.model,
            request_json=to_json(request),
            seconds=seconds,
            created_at_s=time.time(),
            key_hash=key_hash,
            alike=duration_key(request),
            webhook_json=webhook_json(webhook),
            **claim,
        )
        async with self.session() as session, session.begin():
            session.add(row)
        return record_of(row)  # as created: a runner may claim the clip from now on

    async def get(self, clip_id: str) -> ClipRecord | None:
        async with self.session() as session:
            row = await session.scalar(select(ClipRow).where(ClipRow.id == clip_id))
        return None if row is None else record_of(row)

    async def get_all(self, clip_ids: Collection[str]) -> dict[str, ClipRecord]:
        """Return the existing clips among ``clip_ids``, by id."""
        async with self.session() as session:
            rows = await session.scalars(select(ClipRow).where(ClipRow.id.in_(clip_ids)))
            return {row.id: record_of(row) for row in rows}

    async def page(
        self, *, after: ClipRecord | None, limit: int, ascending: bool, key_hash: str | None = None
    ) -> list[ClipRecord]:
        """Return up to ``limit`` clips after ``after``, newest first unless ``ascending``.

        With ``key_hash``, only the clips of that key.
        """
        query = select(ClipRow).order_by(ClipRow.number if ascending else ClipRow.number.desc()).limit(limit)
        if after is not None:
            query = query.where(ClipRow.number > after.number if ascending else ClipRow.number < after.number)
        if key_hash is not None:
            query = query.where(ClipRow.key_hash == key_hash)
        async with self.session() as session:
            return [record_of(row) for row in await session.scalars(query)]

    async def delete(self, clip_id: str) -> bool:
        """Delete a record. Return whether it existed. Its runner notices at its next report."""
        async with self.session() as session, session.begin():
            row = await session.scalar(select(ClipRow).where(ClipRow.id == clip_id))
            await session.execute(delete(ClipRow).where(ClipRow.id == clip_id))
        return row is not None

    async def fail_completed(self, clip_id: str, error: ClipError) -> bool:
        """Mark a completed clip as failed. Return whether there was such a clip."""
        completed = update(ClipRow).where(ClipRow.id == clip_id, ClipRow.status == "completed")
        async with self.engine.begin() as connection:
            result = await connection.execute(completed.values(status="failed", error_json=to_json(error)))
            return bool(result.rowcount)

    async def unknown(self, clip_ids: Collection[str]) -> set[str]:
        """Return the ids among ``clip_ids`` that have no record."""
        async with self.session() as session:
            return set(clip_ids) - set(await session.scalars(select(ClipRow.id)))

    async def num_waiting(self) -> int:
        query = select(func.count()).select_from(ClipRow).where(ClipRow.status == "queued")
        async with self.session() as session:
            return await session.scalar(query) or 0

    async def num_open(self, key_hash: str) -> int:
        """Return how many clips of a key are queued or in progress."""
        is_open = (ClipRow.key_hash == key_hash, ClipRow.status.in_(OPEN))
        query = select(func.count()).select_from(ClipRow).where(*is_open)
        async with self.session() as session:
            return await session.scalar(query) or 0

    async def open_clips(self, models: Collection[str]) -> list[OpenClip]:
        """Return the queued and running clips of ``models``, oldest first."""
        columns = (ClipRow.id, ClipRow.model, ClipRow.alike, ClipRow.status, ClipRow.eta_at_s, ClipRow.not_before_s)
        query = select(*columns).where(ClipRow.model.in_(models), ClipRow.status.in_(OPEN)).order_by(ClipRow.number)
        async with self.session() as session:
            return [OpenClip(*row) for row in await session.execute(query)]

    async def finished_before(self, time_s: float) -> list[str]:
        """Return the ids of the clips that were completed or failed before ``time_s``."""
        async with self.session() as session:
            return list(await session.scalars(select(ClipRow.id).where(ClipRow.completed_at_s < time_s)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A lease on a clip."""

    clip: ClipRecord
    """The clip as it was when it was claimed."""
    owner: str
    """New with every claim, so writes of a late runner have no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Claims clips. A write with a lost claim returns False."""

    store: ClipStore
    """The records."""
    lease_s: float
    """Duration of a claim, counted anew from each report."""

    async def take(self, models: Collection[str]) -> Claim | None:
        """Claim the oldest clip of ``models`` that is queued or whose claim has expired."""
        now_s, owner = time.time(), secrets.token_hex(16)
        oldest = first_free(ClipRow.number, _free(now_s), ClipRow.model.in_(models))
        values = {"attempts": ClipRow.attempts + 1, "progress": 0, "num_previews": 0, "eta_at_s": None}
        take = update(ClipRow).where(ClipRow.number == oldest).values(**self._claim(owner), **values)
        row = await row_of(self.store.engine, take.returning(*ClipRow.__table__.c))
        if row is None:
            return None
        clip = record_of(ClipRow(**row._asdict()))
        if clip.attempts == 1:
            CLIP_WAITS.labels(row.model).observe(now_s - row.created_at_s)
        return Claim(clip=clip, owner=owner)

    async def begin(
        self, request: MediaRequest, seconds: str, key_hash: str, clip_id: str, webhook: Webhook | None = None
    ) -> Claim:
        """Create a clip and return the claim to it, with no moment in which another runner could claim it."""
        owner = secrets.token_hex(16)
        values = {"attempts": 1, **self._claim(owner)}
        clip = await self.store.create(request, seconds, key_hash, clip_id, values, webhook)
        CLIP_WAITS.labels(request.model).observe(0.0)
        return Claim(clip=clip, owner=owner)

    async def report(self, claim: Claim, progress: int, num_previews: int, eta_at_s: float | None = None) -> bool:
        """Renew the claim. Return False if it is lost: the clip was deleted or taken over."""
        values = {"progress": progress, "num_previews": num_previews, "eta_at_s": eta_at_s}
        return await self._write(_held(claim), **self._lease(), **values)

    async def complete(self, claim: Claim, timings: StageTimes) -> bool:
        return await self._end(claim, "completed", progress=100, timings_json=to_json(timings))

    async def fail(self, claim: Claim, error: ClipError) -> bool:
        return await self._end(claim, "failed", error, error_json=to_json(error))

    async def give_back(self, claim: Claim, *, wait_s: float, counts: bool) -> bool:
        """Requeue the clip, not to be claimed for ``wait_s``. ``counts``: whether this was an attempt."""
        attempts = claim.clip.attempts if counts else claim.clip.attempts - 1
        values = {"status": "queued", "progress": 0, "attempts": attempts, "not_before_s": time.time() + wait_s}
        return await self._write(_held(claim), **values, owner="", eta_at_s=None)

    async def _end(self, claim: Claim, status: ClipStatus, error: ClipError | None = None, **values: Any) -> bool:
        """Write the end of a clip, together with the message about it."""
        clip = claim.clip
        ended = _held(claim).values(status=status, completed_at_s=time.time(), owner="", **values)
        async with self.store.engine.begin() as connection:
            is_held = bool((await connection.execute(ended)).rowcount)
            if is_held and clip.webhook is not None:
                reason = None if error is None else {"code": error.code, "message": error.message}
                data = {
                    "id": clip.id,
                    "object": "video",
                    "model": clip.request.model,
                    "status": status,
                    "error": reason,
                }
                message = delivery(clip.webhook, f"video.{status}", data)
                await connection.execute(insert_into(DeliveryRow, self.store.engine).values(**message))
            return is_held

    def _claim(self, owner: str) -> dict[str, Any]:
        return {"status": "in_progress", "owner": owner, **self._lease()}

    def _lease(self) -> dict[str, Any]:
        return {"lease_until_s": time.time() + self.lease_s}

    async def _write(self, statement: Update, **values: Any) -> bool:
        async with self.store.engine.begin() as connection:
            result = await connection.execute(statement.values(**values))
            return bool(result.rowcount)


def _held(claim: Claim) -> Update:
    return update(ClipRow).where(ClipRow.id == claim.clip.id, ClipRow.owner == claim.owner)


def _free(now_s: float) -> ColumnElement[bool]:
    waits = and_(ClipRow.status == "queued", ClipRow.not_before_s <= now_s)
    orphaned = and_(ClipRow.status == "in_progress", ClipRow.lease_until_s < now_s)
    return or_(waits, orphaned)
