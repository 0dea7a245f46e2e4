"""Use of keys, in the database: over restarts, and through all replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import Context
from dataclasses import dataclass, field
from uuid import uuid4

from sqlalchemy import case, delete, func, select

from deployments.asyncio_tools import cancel, to_the_end
from deployments.clips.storage import UNAVAILABLE
from deployments.database.database import Database, insert_into, lock_until_end
from deployments.database.tables import UsageRow
from deployments.usage.quotas import Balance

RETRY_S = 1.0
ROTATE_S = 86400.0
"""Time for which a replica writes to the same rows, even if it lives longer."""
ENDED_AFTER_S = 7 * ROTATE_S
"""Age at which rows are final: their replica was killed, or would begin new ones."""
TOTAL = ""
"""``replica`` of the row of a key into which final rows are merged."""
KEY = ("key_hash", "replica")

logger = logging.getLogger("troupe.accounts")


@dataclass(kw_only=True, slots=True)
class _OwnRows:
    """Rows that a replica writes to, one a key."""

    replica: str = field(default_factory=lambda: uuid4().hex)
    since: int = field(default_factory=lambda: int(time.time()))
    used: dict[str, Balance] = field(default_factory=dict)
    written: dict[str, Balance] = field(default_factory=dict)
    has_merged: bool = False
    """True if final rows were merged once since these began."""

    @property
    def is_stored(self) -> bool:
        return self.has_merged and self.used == self.written


class UsageLedger:
    """Writes what is used through one replica, and merges rows of those that have ended.

    A row is written whole, so that a write whose outcome is unknown may be repeated. A merge is one transaction that
    reads what it adds in the database, so it may be repeated too. The replica's own rows are merged when it ends, and
    once they are ``ROTATE_S`` old. Those of a killed one are merged by any other, at ``ENDED_AFTER_S``: until then a
    replica must reach the database again, and no clock may be off by as much.
    """

    def __init__(self, database: Database) -> None:
        self._database, self._rows = database, _OwnRows()
        self._final: set[str] = set()
        """``replica`` of earlier rows of this process, which are not merged yet."""
        self._writing: asyncio.Task[None] | None = None
        self._is_ending = False

    def note(self, key: str, gpu_s: float, *, is_finished: bool) -> None:
        """Add to the use of ``key``, and write it soon. Changes that come meanwhile are one write."""
        self._rotate(ROTATE_S)
        rows = self._rows
        more = Balance(since=rows.since, num_requests=int(is_finished), gpu_s=gpu_s)
        rows.used[key] = rows.used[key] + more if key in rows.used else more
        if self._writing is None or self._writing.done():
            # In a context of its own: with a request, Serve cancels what was begun in the request's.
            self._writing = asyncio.get_running_loop().create_task(self._store_all(), context=Context())

    async def flush(self) -> None:
        """Return once all is written and merged. Entries that cannot be written now are dropped and logged."""
        if self._writing is not None:
            self._is_ending = True
            await cancel(self._writing)
        try:
            await to_the_end(self._store())
            self._rotate(0)
            await to_the_end(self._store())
        except UNAVAILABLE as error:
            if self._rows.used != self._rows.written:
                logger.error("what keys have used since the last write is lost: %s", error)

    async def used(self, key: str) -> Balance | None:
        """Return what ``key`` has used through all replicas, over restarts; None if it never did."""
        self._rotate(ROTATE_S)
        rows = None
        while rows is not self._rows:  # it may have merged its own meanwhile
            rows = self._rows
            sums = func.min(UsageRow.since), func.sum(UsageRow.num_requests), func.sum(UsageRow.gpu_s)
            query = select(*sums).where(UsageRow.key_hash == key, UsageRow.replica != rows.replica)
            async with self._database.engine.connect() as connection:
                since, num_requests, gpu_s = (await connection.execute(query)).one()
        own = rows.used.get(key)
        if since is None:
            return own
        others = Balance(since=since, num_requests=num_requests, gpu_s=gpu_s)
        return others if own is None else others + own

    def _rotate(self, after_s: float) -> None:
        """Begin new rows if all is written, and these are ``after_s`` old: others may merge them later."""
        rows = self._rows
        if time.time() >= rows.since + after_s and rows.used == rows.written:
            self._final.add(rows.replica)
            self._rows = _OwnRows()

    async def _store_all(self) -> None:
        while not self._rows.is_stored:
            try:
                await to_the_end(self._store())
            except UNAVAILABLE as error:
                if self._is_ending:
                    return
                logger.warning("what keys have used cannot be written: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _store(self) -> None:
        rows = self._rows
        await self._write(rows)
        if not rows.has_merged:
            await self._merge()
            rows.has_merged = True

    async def _write(self, rows: _OwnRows) -> None:
        new = {key: balance for key, balance in rows.used.items() if rows.written.get(key) != balance}
        if not new:
            return
        engine = self._database.engine
        insert = insert_into(UsageRow, engine)
        sums = {"num_requests": insert.excluded.num_requests, "gpu_s": insert.excluded.gpu_s}
        async with engine.begin() as connection:
            values = [_values(key, rows.replica, balance) for key, balance in new.items()]
            await connection.execute(insert.on_conflict_do_update(index_elements=KEY, set_=sums), values)
        rows.written.update(new)

    async def _merge(self) -> None:
        """Move all final rows into the totals of their keys, in one transaction."""
        final, old = frozenset(self._final), UsageRow.since <= int(time.time() - ENDED_AFTER_S)
        columns = (UsageRow.key_hash, UsageRow.since, UsageRow.num_requests, UsageRow.gpu_s)
        moved = delete(UsageRow).where(UsageRow.replica != TOTAL, old | UsageRow.replica.in_(final)).returning(*columns)
        engine, sums = self._database.engine, dict[str, Balance]()
        insert = insert_into(UsageRow, engine)
        new = insert.excluded
        added = {
            "since": case((new.since < UsageRow.since, new.since), else_=UsageRow.since),
            "num_requests": UsageRow.num_requests + new.num_requests,
            "gpu_s": UsageRow.gpu_s + new.gpu_s,
        }
        async with engine.begin() as connection:
            await lock_until_end(connection, UsageRow.__tablename__)
            for key, since, num_requests, gpu_s in await connection.execute(moved):
                balance = Balance(since=since, num_requests=num_requests, gpu_s=gpu_s)
                sums[key] = sums[key] + balance if key in sums else balance
            if sums:
                values = [_values(key, TOTAL, balance) for key, balance in sums.items()]
                await connection.execute(insert.on_conflict_do_update(index_elements=KEY, set_=added), values)
        self._final -= final


def _values(key: str, replica: str, balance: Balance) -> dict[str, str | float]:
    sums = {"since": balance.since, "num_requests": balance.num_requests, "gpu_s": balance.gpu_s}
    return {"key_hash": key, "replica": replica, **sums}
