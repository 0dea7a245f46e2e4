"""Records of batches and of their files, in the database."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sqlalchemy import ColumnElement, ScalarSelect, Select, delete, func, literal, or_, select, true, update

from deployments.database.database import Database, first_free, insert_into, row_of
from deployments.database.tables import BatchRow, FileRow

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(kw_only=True, slots=True)
class BatchRecord:
    """A batch as clients see it. Times are Unix seconds."""

    id: str
    """``batch_`` and 128 random bits."""
    endpoint: str
    """Route of all its requests, such as "/v1/images/generations"."""
    input_file_id: str
    """File with a request a line."""
    created_at: int
    """Unix time at which the client created it."""
    expires_at: int
    """Unix time at which requests that have not begun are given up."""
    status: BatchStatus = "validating"
    """State, as one of OpenAI's values."""
    metadata: dict[str, str] | None = None
    """The client's own; None: it sent none."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Lines that cannot be requests, as OpenAI's error objects; at most 100."""
    num_total: int = 0
    """Requests of the input file; 0 before they are counted."""
    num_completed: int = 0
    """Requests that succeeded."""
    num_failed: int = 0
    """Requests that ended in an error."""
    output_file_id: str | None = None
    """File of the answers; None before the end, or without any."""
    error_file_id: str | None = None
    """File of the errors; None before the end, or without any."""
    times: dict[str, int] = field(default_factory=dict)
    """Unix time at which each status began, by its name."""

    @property
    def is_open(self) -> bool:
        return self.status in OPEN


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file that a client has handed in, or gets back."""

    id: str
    """``file-`` and 128 random bits."""
    number: int
    """Order of creation."""
    filename: str
    """Name that the client gave."""
    purpose: str
    """Purpose, such as "batch" and "user_data"."""
    num_bytes: int
    """Size of the content."""
    created_at: int
    """Unix time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchClaim:
    """A lease on a batch."""

    batch: BatchRecord
    """The batch as it was when it was claimed."""
    key_hash: str
    """Hash of the API key that it is of; empty without keys."""
    owner: str
    """New with every claim, so writes of a late runner have no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStore:
    """Batches and files by the key that they are of; with ``key_hash`` None, of all keys."""

    database: Database
    """Holds the records."""
    lease_s: float
    """Duration of a claim; then another runner takes the batch over."""

    async def add_file(
        self, key_hash: str, filename: str, purpose: str, num_bytes: int, file_id: str, max_bytes: int | None = None
    ) -> FileRecord | None:
        """Record a file. Return None, and record nothing, if the key's files would then exceed ``max_bytes``.

        Files that are added at the same moment, also by other replicas, are counted one after the other.
        """
        values = {
            "id": file_id,
            "key_hash": key_hash,
            "filename": filename,
            "purpose": purpose,
            "num_bytes": num_bytes,
            "created_at_s": time.time(),
        }
        columns = FileRow.__table__.c
        fits = true() if max_bytes is None else _stored_bytes(key_hash) + num_bytes <= max_bytes
        row = select(*(literal(value, columns[name].type) for name, value in values.items())).where(fits)
        insert = insert_into(FileRow, self.database.engine).from_select(list(values), row).returning(*columns)
        added = await row_of(self.database.engine, insert, lock=None if max_bytes is None else f"files of {key_hash}")
        return None if added is None else _file_record(added)

    async def stored_bytes(self, key_hash: str) -> int:
        """Return the size of all files of a key."""
        async with self.database.engine.connect() as connection:
            return int(await connection.scalar(select(_stored_bytes(key_hash))) or 0)

    async def file(self, file_id: str, key_hash: str | None) -> FileRecord | None:
        files = await self._files(select(*FileRow.__table__.c).where(FileRow.id == file_id), key_hash)
        return files[0] if files else None

    async def files(
        self, key_hash: str | None, after: int | None, limit: int, *, is_rising: bool, purpose: str | None
    ) -> list[FileRecord]:
        """Return files of ``purpose`` (None: any) that follow the number ``after``, the newest first or last."""
        number = FileRow.number
        query = select(*FileRow.__table__.c).order_by(number.asc() if is_rising else number.desc()).limit(limit)
        if after is not None:
            query = query.where(number > after if is_rising else number < after)
        if purpose is not None:
            query = query.where(FileRow.purpose == purpose)
        return await self._files(query, key_hash)

    async def _files(self, query: Select[Any], key_hash: str | None) -> list[FileRecord]:
        if key_hash is not None:
            query = query.where(FileRow.key_hash == key_hash)
        async with self.database.engine.connect() as connection:
            return [_file_record(row) for row in await connection.execute(query)]

    async def content_names(self) -> set[str]:
        """Return the names of all content that has a record: files, and the folders of open batches."""
        names = select(FileRow.id).union_all(select(BatchRow.id).where(BatchRow.status.in_(OPEN)))
        async with self.database.engine.connect() as connection:
            return set(await connection.scalars(names))

    async def remove_file(self, file_id: str) -> None:
        async with self.database.engine.begin() as connection:
            await connection.execute(delete(FileRow).where(FileRow.id == file_id))

    async def add(self, batch: BatchRecord, key_hash: str) -> None:
        values = {"id": batch.id, "key_hash": key_hash, "status": batch.status, "record_json": to_json(batch)}
        async with self.database.engine.begin() as connection:
            insert = insert_into(BatchRow, self.database.engine)
            await connection.execute(insert.values(**values, owner="", lease_until_s=batch.created_at))

    async def get(self, batch_id: str, key_hash: str | None) -> BatchRecord | None:
        found = await self._batches(BatchRow.id == batch_id, key_hash, 1)
        return found[0] if found else None

    async def page(self, key_hash: str | None, after: str | None, limit: int) -> list[BatchRecord]:
        """Return the newest batches, or those older than ``after``."""
        number = select(BatchRow.number).where(BatchRow.id == after).scalar_subquery()
        return await self._batches(BatchRow.number > 0 if after is None else BatchRow.number < number, key_hash, limit)

    async def _batches(self, condition: Any, key_hash: str | None, limit: int) -> list[BatchRecord]:
        query = select(BatchRow.status, BatchRow.record_json).where(condition)
        if key_hash is not None:
            query = query.where(BatchRow.key_hash == key_hash)
        async with self.database.engine.connect() as connection:
            rows = await connection.execute(query.order_by(BatchRow.number.desc()).limit(limit))
            return [from_json(row.record_json, row.status) for row in rows]

    async def cancel(self, batch_id: str) -> None:
        """Let the replica that works on the batch end it."""
        is_running = BatchRow.status.in_(("validating", "in_progress"))
        async with self.database.engine.begin() as connection:
            cancelled = update(BatchRow).where(BatchRow.id == batch_id, is_running)
            await connection.execute(cancelled.values(status="cancelling"))

    async def take(self) -> BatchClaim | None:
        """Claim the open batch that no other replica works on, and that has waited for longest."""
        now_s, owner = time.time(), secrets.token_hex(16)
        longest = first_free(BatchRow.number, *_is_free(now_s), by=BatchRow.lease_until_s)
        take = update(BatchRow).where(BatchRow.number == longest)
        take = take.values(owner=owner, lease_until_s=now_s + self.lease_s)
        columns = (BatchRow.status, BatchRow.record_json, BatchRow.key_hash)
        row = await row_of(self.database.engine, take.returning(*columns))
        if row is None:
            return None
        return BatchClaim(batch=from_json(row.record_json, row.status), key_hash=row.key_hash, owner=owner)

    async def renew(self, claim: BatchClaim) -> str | None:
        """Write the record, and renew the lease. Return the status in the database; None if the lease is lost."""
        values = {"record_json": to_json(claim.batch), "lease_until_s": time.time() + self.lease_s}
        return await self._write(claim, **values)

    async def set_status(self, claim: BatchClaim, status: BatchStatus, unless: Collection[str] = ()) -> bool:
        """Write the record with a new status. Return False if its status is one of ``unless``, or the lease is lost."""
        claim.batch.times.setdefault(status, int(time.time()))
        before, claim.batch.status = claim.batch.status, status
        values: dict[str, Any] = {"record_json": to_json(claim.batch), "status": status}
        if not claim.batch.is_open:
            values |= {"owner": "", "lease_until_s": time.time()}
        if await self._write(claim, *unless, **values) is not None:
            return True
        claim.batch.status = before
        return False

    async def remove_ended(self, before_s: float) -> None:
        """Delete the records of batches that ended before the Unix time ``before_s``. Their files stay."""
        old = (BatchRow.status.not_in(OPEN), BatchRow.lease_until_s < before_s)
        async with self.database.engine.begin() as connection:
            await connection.execute(delete(BatchRow).where(*old))

    async def is_any_free(self) -> bool:
        """Return whether there is an open batch that no replica works on."""
        async with self.database.engine.connect() as connection:
            return await connection.scalar(select(BatchRow.number).where(*_is_free(time.time())).limit(1)) is not None

    async def give_back(self, claim: BatchClaim, *, is_last: bool = False) -> None:
        """Leave the batch to others: in the order of creation, or behind all that wait if it ``is_last``."""
        await self._write(claim, owner="", lease_until_s=time.time() if is_last else claim.batch.created_at)

    async def _write(self, claim: BatchClaim, *unless: str, **values: Any) -> str | None:
        mine = (BatchRow.id == claim.batch.id, BatchRow.owner == claim.owner, BatchRow.status.not_in(unless))
        written = update(BatchRow).where(*mine).values(**values).returning(BatchRow.status)
        row = await row_of(self.database.engine, written)
        return None if row is None else row.status


def _is_free(now_s: float) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions of a batch that waits: since ``lease_until_s``."""
    return BatchRow.status.in_(OPEN), or_(BatchRow.owner == "", BatchRow.lease_until_s < now_s)


def _stored_bytes(key_hash: str) -> ScalarSelect[int]:
    total = select(func.coalesce(func.sum(FileRow.num_bytes), 0)).where(FileRow.key_hash == key_hash)
    return total.scalar_subquery()


def _file_record(row: Any) -> FileRecord:
    return FileRecord(
        id=row.id,
        number=row.number,
        filename=row.filename,
        purpose=row.purpose,
        num_bytes=row.num_bytes,
        created_at=int(row.created_at_s),
    )


def to_json(batch: BatchRecord) -> str:
    return json.dumps(asdict(batch))


def from_json(text: str, status: str) -> BatchRecord:
    return BatchRecord(**json.loads(text) | {"status": status})
