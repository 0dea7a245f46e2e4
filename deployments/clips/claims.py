"""Claims that expire: each clip has one runner, and an orphaned clip gets a new one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Update, and_, or_, select, update

from deployments.clips.records import ClipError, ClipRecord, ClipRow, to_json
from deployments.clips.store import ClipStore
from deployments.observability.metrics import observe_clip_wait
from deployments.studio.interface import StageTimes
from pipelines.request import MediaRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A lease on ``clip``. ``owner`` is new with every claim, so writes of a late runner have no effect."""

    clip: ClipRecord
    owner: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Claims clips of ``store`` for ``lease_s`` at a time. A write with a lost claim returns False."""

    store: ClipStore
    lease_s: float

    async def take(self, models: Collection[str]) -> Claim | None:
        """Claim the oldest clip of ``models`` that is queued or whose claim has expired."""
        now_s = time.time()
        oldest = select(ClipRow).where(_free(now_s), ClipRow.model.in_(models)).order_by(ClipRow.number).limit(4)
        async with self.store.session() as session:
            rows = list(await session.scalars(oldest))
        for row in rows:
            owner = secrets.token_hex(16)
            # Several runners may have read the row as free; the first UPDATE wins.
            take = update(ClipRow).where(ClipRow.id == row.id, ClipRow.attempts == row.attempts, _free(now_s))
            values = {"attempts": row.attempts + 1, "progress": 0, "num_previews": 0, "eta_at_s": None}
            if await self._write(take, **self._claim(owner), **values):
                if row.attempts == 0:
                    observe_clip_wait(row.model, now_s - row.created_at_s)
                clip = await self.store.get(row.id)
                return None if clip is None else Claim(clip=clip, owner=owner)
        return None

    async def begin(self, request: MediaRequest, seconds: str, key_hash: str, clip_id: str) -> Claim:
        """Create a clip and return the claim to it, with no moment in which another runner could claim it."""
        owner = secrets.token_hex(16)
        values = {"attempts": 1, **self._claim(owner)}
        clip = await self.store.create(request, seconds, key_hash, clip_id, values)
        observe_clip_wait(request.model, 0.0)
        return Claim(clip=clip, owner=owner)

    async def report(self, claim: Claim, progress: int, num_previews: int, eta_at_s: float | None = None) -> bool:
        """Renew the claim. Return False if it is lost: the clip was deleted or taken over."""
        values = {"progress": progress, "num_previews": num_previews, "eta_at_s": eta_at_s}
        return await self._write(_held(claim), **self._lease(), **values)

    async def complete(self, claim: Claim, timings: StageTimes) -> bool:
        values = {"status": "completed", "progress": 100, "timings_json": to_json(timings)}
        return await self._write(_held(claim), **values, completed_at_s=time.time(), owner="")

    async def fail(self, claim: Claim, error: ClipError) -> bool:
        values = {"status": "failed", "error_json": to_json(error)}
        return await self._write(_held(claim), **values, completed_at_s=time.time(), owner="")

    async def give_back(self, claim: Claim, *, wait_s: float, counts: bool) -> bool:
        """Requeue the clip, not to be claimed for ``wait_s``. ``counts``: whether this was an attempt."""
        attempts = claim.clip.attempts if counts else claim.clip.attempts - 1
        values = {"status": "queued", "progress": 0, "attempts": attempts, "not_before_s": time.time() + wait_s}
        return await self._write(_held(claim), **values, owner="", eta_at_s=None)

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
