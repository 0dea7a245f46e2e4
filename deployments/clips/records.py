"""A job as a frozen record, and as a row. Only types and statements that every SQL database has."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import Float, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from deployments.studio.interface import Timings
from pipelines.request import MediaRequest

JobStatus = Literal["queued", "in_progress", "completed", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobError:
    """Why a job failed: ``code`` for programs, ``message`` for people."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A clip somebody asked for. ``number`` orders jobs by creation; times are Unix seconds; ``progress`` is 0–100."""

    id: str
    number: int
    request: MediaRequest
    seconds: str
    status: JobStatus
    progress: int
    num_previews: int
    attempts: int
    created_at: int
    completed_at: int | None
    error: JobError | None
    timings: Timings | None


class Base(DeclarativeBase):
    pass


class JobRow(Base):
    """``owner`` is the runner that holds the job until ``lease_until_s``; nobody touches it before ``not_before_s``."""

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


def job_of(row: JobRow) -> Job:
    return Job(
        id=row.id,
        number=row.number,
        request=request_from_json(row.request_json),
        seconds=row.seconds,
        status=row.status,  # type: ignore[arg-type]
        progress=row.progress,
        num_previews=row.num_previews,
        attempts=row.attempts,
        created_at=int(row.created_at_s),
        completed_at=None if row.completed_at_s is None else int(row.completed_at_s),
        error=None if row.error_json is None else JobError(**json.loads(row.error_json)),
        timings=None if row.timings_json is None else Timings(**json.loads(row.timings_json)),
    )


def to_json(record: MediaRequest | JobError | Timings) -> str:
    return json.dumps(asdict(record))


def request_from_json(text: str) -> MediaRequest:
    fields: dict[str, Any] = json.loads(text)
    return MediaRequest(**fields | {"preview_steps": tuple(fields["preview_steps"])})
