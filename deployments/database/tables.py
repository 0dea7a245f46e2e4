"""Tables of the database. A change needs a revision in ``migrations/versions`` and its number in ``schema.HEAD``."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Integer, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


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
    webhook_json: Mapped[str | None] = mapped_column(Text)
    """Receiver of the message about its end."""


class UsageRow(Base):
    """Use of one key through one replica of the API, or through all whose rows were merged."""

    __tablename__ = "troupe_usage"

    key_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    replica: Mapped[str] = mapped_column(String(64), primary_key=True)
    since: Mapped[int] = mapped_column(Integer)
    """Unix time."""
    num_requests: Mapped[int] = mapped_column(Integer)
    gpu_s: Mapped[float] = mapped_column(Float(53))


class AnswerRow(Base):
    """A request with an ``Idempotency-Key``: under way as long as ``answer`` is null."""

    __tablename__ = "troupe_answers"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of API key, path and ``Idempotency-Key``."""
    fingerprint: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(64))
    """The call that works on it until ``lease_until_s``."""
    lease_until_s: Mapped[float] = mapped_column(Float(53))
    created_at_s: Mapped[float] = mapped_column(Float(53), index=True)
    num_bytes: Mapped[int] = mapped_column(Integer, default=0)
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)


class DeliveryRow(Base):
    """A message to a webhook. Its id is made of what it tells, so there is one of each end of a clip."""

    __tablename__ = "troupe_deliveries"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    secret: Mapped[str] = mapped_column(Text)
    body: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    not_before_s: Mapped[float] = mapped_column(Float(53), index=True)
    """No replica sends it before: until then another one does, or it waits after a failure."""
    ended_at_s: Mapped[float | None] = mapped_column(Float(53))
    """Unix time at which it was received or given up."""


class FileRow(Base):
    """A file of a batch."""

    __tablename__ = "troupe_files"

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    key_hash: Mapped[str] = mapped_column(String(64))
    filename: Mapped[str] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(32))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at_s: Mapped[float] = mapped_column(Float(53))


class BatchRow(Base):
    """Many requests in one file."""

    __tablename__ = "troupe_batches"

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    key_hash: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16), index=True)
    record_json: Mapped[str] = mapped_column(Text)
    """The record that clients see, without its status."""
    owner: Mapped[str] = mapped_column(String(64), default="")
    """The replica that works on it until ``lease_until_s``."""
    lease_until_s: Mapped[float] = mapped_column(Float(53), default=0.0)


class LoraRow(Base):
    """An adapter that came at run time."""

    __tablename__ = "troupe_loras"
    __table_args__ = (UniqueConstraint("model", "scope", "name"),)

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    """The name of its folder, too."""
    model: Mapped[str] = mapped_column(String(512))
    name: Mapped[str] = mapped_column(String(255))
    scope: Mapped[str] = mapped_column(String(64))
    """Hash of the only key that may use it; empty: all may."""
    key_hash: Mapped[str] = mapped_column(String(64))
    """The key that added it."""
    scale: Mapped[float] = mapped_column(Float(53))
    part: Mapped[str] = mapped_column(String(255))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    """Size of its file."""
    status: Mapped[str] = mapped_column(String(16))
    created_at_s: Mapped[float] = mapped_column(Float(53))
