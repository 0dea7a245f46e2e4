"""A clip as a frozen record, and as a row. Only types and statements that every SQL database has."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import Float, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from deployments.studio.interface import StageTimes
from pipelines.request import Lora, MediaRequest

ClipStatus = Literal["queued", "in_progress", "completed", "failed"]
OPEN = ("queued", "in_progress")
FILE_GONE = "file_gone"
"""The code of a clip that was completed, and whose file is there no longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipError:
    """Why a clip failed: ``code`` for programs, ``message`` for people; ``retry_after_s`` if another may not. Ranks had
    been at work for ``gpu_s`` in the last attempt, None if nobody knows."""

    code: str
    message: str
    retry_after_s: float | None = None
    gpu_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRecord:
    """A clip somebody asked for. ``number`` orders clips by creation; times are Unix seconds, ``created_at_s`` to the
    fraction; ``progress`` is 0–100. ``eta_at_s`` is when it is predicted to be done, None if nobody knows.
    ``num_before`` clips of its model wait before it; None if it does not wait, or if that was not asked.

    ``key_hash`` is that of the API key that asked for it, empty where none was needed.
    """

    id: str
    number: int
    request: MediaRequest
    seconds: str
    status: ClipStatus
    progress: int
    num_previews: int
    attempts: int
    created_at_s: float
    completed_at: int | None
    error: ClipError | None
    timings: StageTimes | None
    key_hash: str = ""
    eta_at_s: float | None = None
    num_before: int | None = None

    @property
    def created_at(self) -> int:
        return int(self.created_at_s)

    @property
    def gpu_s(self) -> float | None:
        """How long ranks were at work for it, once it has ended; None as long as nobody knows."""
        if self.timings is not None:
            return self.timings.gpu_s
        return None if self.error is None else self.error.gpu_s

    @property
    def is_open(self) -> bool:
        """Whether it waits or is made."""
        return self.status in OPEN

    @property
    def eta_s(self) -> float | None:
        """How long it will take from now, by prediction; None of one that has ended."""
        return None if self.eta_at_s is None or not self.is_open else max(0.0, self.eta_at_s - time.time())


class Base(DeclarativeBase):
    pass


class ClipRow(Base):
    """``owner`` is the runner that has the clip until ``lease_until_s``; nobody touches it before ``not_before_s``.

    ``eta_at_s`` is what its gang predicts; clips that are ``alike`` take equally long.
    """

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
    lease_until_s: Mapped[float] = mapped_column(Float(53), default=0.0)
    not_before_s: Mapped[float] = mapped_column(Float(53), default=0.0)
    error_json: Mapped[str | None] = mapped_column(Text)
    timings_json: Mapped[str | None] = mapped_column(Text)
    key_hash: Mapped[str] = mapped_column(String(64), default="", server_default="")
    eta_at_s: Mapped[float | None] = mapped_column(Float(53))
    alike: Mapped[str] = mapped_column(String(128), default="", server_default="")


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
