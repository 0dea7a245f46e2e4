"""Use of keys, in the database: over restarts, and through all replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextvars import Context
from uuid import uuid4

from sqlalchemy import func, select

from deployments.asyncio_tools import cancel, to_the_end
from deployments.clips.storage import UNAVAILABLE
from deployments.database.database import Database, insert_into
from deployments.database.tables import UsageRow
from deployments.usage.quotas import Account, Balance

RETRY_S = 1.0
KEY = ("key_hash", "replica")

logger = logging.getLogger("troupe.accounts")


class UsageLedger:
    """Writes the accounts of one replica as they change. Each replica has rows of its own, with sums since it started.

    A row is written whole, so that a write whose outcome is unknown may be repeated.
    """

    def __init__(self, database: Database) -> None:
        self._database, self._replica = database, uuid4().hex
        self._unwritten: dict[str, Account] = {}
        self._writing: asyncio.Task[None] | None = None
        self._is_ending = False

    def note(self, key: str, account: Account) -> None:
        """Write the account of ``key`` soon. Changes that come meanwhile are one write."""
        self._unwritten[key] = account
        if self._writing is None or self._writing.done():
            # In a context of its own: with a request, Serve cancels what was begun in the request's.
            self._writing = asyncio.get_running_loop().create_task(self._write_all(), context=Context())

    async def flush(self) -> None:
        """Return once all is written. Entries that cannot be written now are dropped and logged."""
        if self._writing is not None:
            self._is_ending = True
            await cancel(self._writing)
        try:
            await self._write(self._unwritten)
        except UNAVAILABLE as error:
            logger.error("what keys have used since the last write is lost: %s", error)

    async def others(self, key: str) -> Balance | None:
        """Return what ``key`` has used through other replicas, and before a restart; None if it never did."""
        sums = func.min(UsageRow.since), func.sum(UsageRow.num_requests), func.sum(UsageRow.gpu_s)
        query = select(*sums).where(UsageRow.key_hash == key, UsageRow.replica != self._replica)
        async with self._database.engine.connect() as connection:
            since, num_requests, gpu_s = (await connection.execute(query)).one()
        return None if since is None else Balance(since=since, num_requests=num_requests, gpu_s=gpu_s)

    async def _write_all(self) -> None:
        while accounts := dict(self._unwritten):
            self._unwritten.clear()
            try:
                await to_the_end(self._write(accounts))
            except UNAVAILABLE as error:
                self._unwritten = accounts | self._unwritten
                if self._is_ending:
                    return
                logger.warning("what keys have used cannot be written: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _write(self, accounts: Mapping[str, Account]) -> None:
        rows = [
            {"key_hash": key, "replica": self._replica, "since": account.since}
            | {"num_requests": account.num_requests, "gpu_s": account.gpu_s}
            for key, account in accounts.items()
        ]
        if not rows:
            return
        engine = self._database.engine
        insert = insert_into(UsageRow, engine)
        new = {"num_requests": insert.excluded.num_requests, "gpu_s": insert.excluded.gpu_s}
        async with engine.begin() as connection:
            await connection.execute(insert.on_conflict_do_update(index_elements=KEY, set_=new), rows)
