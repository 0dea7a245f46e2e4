"""Clip records: their types, their table, and the SQLAlchemy engine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Float, Integer, String, Text, event, inspect, text
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateColumn

from deployments.clips.storage import StorageFullError, StorageLostError, is_full
from deployments.places import make_private_file
from deployments.service.interface import StageTimes
from pipelines.request import Lora, MediaRequest

ClipStatus = Literal["queued", "in_progress", "completed", "failed"]
OPEN = ("queued", "in_progress")
FILE_GONE = "file_gone"
"""Error code of a completed clip whose file is gone."""
SQLITE_PRAGMAS = ("journal_mode = WAL", "busy_timeout = 30000", "synchronous = FULL")
"""Readers do not wait for the writer, writers wait for each other, and commits survive a power cut."""
NUM_TRIES = 5
"""Replicas that create the tables at the same moment collide and retry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipError:
    """The failure of a clip: ``code`` for programs, ``message`` for people."""

    code: str
    message: str
    retry_after_s: float | None = None
    gpu_s: float | None = None
    """GPU seconds of the last attempt, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRecord:
    """A requested clip. Times are Unix seconds."""

    id: str
    number: int
    """Order of creation."""
    request: MediaRequest
    seconds: str
    status: ClipStatus
    progress: int
    """0 to 100."""
    num_previews: int
    attempts: int
    created_at_s: float
    completed_at: int | None
    error: ClipError | None
    timings: StageTimes | None
    key_hash: str = ""
    eta_at_s: float | None = None
    """Predicted end."""
    num_before: int | None = None
    """Position in the queue."""

    @property
    def created_at(self) -> int:
        return int(self.created_at_s)

    @property
    def gpu_s(self) -> float | None:
        """GPU seconds of an ended clip; None while unknown."""
        if self.timings is not None:
            return self.timings.gpu_s
        return None if self.error is None else self.error.gpu_s

    @property
    def is_open(self) -> bool:
        """True if the clip is queued or in progress."""
        return self.status in OPEN

    @property
    def eta_s(self) -> float | None:
        """Predicted seconds until its end; None once it has ended."""
        return None if self.eta_at_s is None or not self.is_open else max(0.0, self.eta_at_s - time.time())


class Base(DeclarativeBase):
    pass


class ClipRow(Base):
    """A clip in the database."""

    __tablename__ = "troupe_jobs"

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    model: Mapped[str] = mapped_column(String(512))
    request_json: Mapped[str] = mapped_column(Text)
    seconds: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16), index=True)
    progress: Mapped[int] = mapped_column(Integer, default=0)
    num_previews: Mapped[int] = mapped_column(Integer, default=0)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    created_at_s: Mapped[float] = mapped_column(Float(53))
    completed_at_s: Mapped[float | None] = mapped_column(Float(53))
    owner: Mapped[str] = mapped_column(String(64), default="")
    """Holder of the claim until ``lease_until_s``."""
    lease_until_s: Mapped[float] = mapped_column(Float(53), default=0.0)
    not_before_s: Mapped[float] = mapped_column(Float(53), default=0.0)
    """No runner claims the clip before."""
    error_json: Mapped[str | None] = mapped_column(Text)
    timings_json: Mapped[str | None] = mapped_column(Text)
    key_hash: Mapped[str] = mapped_column(String(64), default="", server_default="")
    eta_at_s: Mapped[float | None] = mapped_column(Float(53))
    alike: Mapped[str] = mapped_column(String(128), default="", server_default="")
    """``eta.duration_key``."""


def record_of(row: ClipRow) -> ClipRecord:
    return ClipRecord(
        id=row.id,
        number=row.number,
        request=request_from_json(row.request_json),
        seconds=row.seconds,
        status=row.status,  # type: ignore[arg-type]
        progress=row.progress,
        num_previews=row.num_previews,
        attempts=row.attempts,
        created_at_s=row.created_at_s,
        completed_at=None if row.completed_at_s is None else int(row.completed_at_s),
        error=None if row.error_json is None else ClipError(**json.loads(row.error_json)),
        timings=None if row.timings_json is None else StageTimes(**json.loads(row.timings_json)),
        key_hash=row.key_hash,
        eta_at_s=row.eta_at_s,
    )


def to_json(record: MediaRequest | ClipError | StageTimes) -> str:
    return json.dumps(asdict(record))


def request_from_json(text: str) -> MediaRequest:
    fields: dict[str, Any] = json.loads(text)
    loras = tuple(Lora(**one) for one in fields.get("loras", ()))
    return MediaRequest(**fields | {"preview_steps": tuple(fields["preview_steps"]), "loras": loras})


async def open_database(url: str) -> AsyncEngine:
    """Return an engine and create the tables. ValueError if async SQLAlchemy cannot use ``url``.

    The engine raises StorageFullError on a full disk, and StorageLostError once its file was deleted or replaced:
    SQLite would go on writing to the unlinked file.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        make_private_file(Path(parsed.database))  # SQLite gives its other files the permissions of this one
    engine = create_async_engine(parsed, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _set_pragmas)
    for try_number in range(1, NUM_TRIES + 1):
        try:
            await _create_tables(engine)
            break
        except DBAPIError:
            if try_number == NUM_TRIES:
                raise
    event.listen(engine.sync_engine, "handle_error", _name_full_disk)
    if engine.dialect.name == "sqlite" and parsed.database:
        # At "checkout" a failure would end the connection, and a cancellation meanwhile might never finish.
        event.listen(engine.sync_engine, "begin", _DatabaseFile(Path(parsed.database)).check)
    return engine


async def _create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.run_sync(_add_columns)


def _add_columns(connection: Connection) -> None:
    """Add the columns that a database of an earlier version lacks. Old rows get the default."""
    for table in Base.metadata.sorted_tables:
        names = {column["name"] for column in inspect(connection).get_columns(table.name)}
        for column in table.columns:
            if column.name not in names:
                assert column.nullable or column.server_default is not None, "old rows need a value"
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))


def _set_pragmas(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in SQLITE_PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _name_full_disk(context: ExceptionContext) -> None:
    failure = context.original_exception
    if "disk is full" in str(failure) or is_full(failure):
        raise StorageFullError(f"the database has no room: {failure}") from failure


class _DatabaseFile:
    """The file at ``path``. Once lost it stays lost: its inode may be reused."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._is_lost = path, _place(path), False

    def check(self, _connection: Connection) -> None:
        self._is_lost = self._is_lost or _place(self._path) != self._place
        if self._is_lost:
            raise StorageLostError(f"the database {self._path} was deleted or replaced under the server: restart it")


def _place(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:  # a database in memory
        return None
    return stat.st_dev, stat.st_ino
