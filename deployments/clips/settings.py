"""Settings of the runner of clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deployments.checks import check_positive

DATABASE = "jobs.sqlite3"


@dataclass(frozen=True, kw_only=True)
class ClipLimits:
    """What a configuration may say of clips. Without slots, since its section there has a second such parent.

    One runner makes ``max_concurrent_videos`` side by side, ``max_waiting_videos`` wait in all. Finished ones are
    deleted after ``keep_videos_s``, if that is not None.
    """

    max_concurrent_videos: int = 2
    max_waiting_videos: int = 100
    keep_videos_s: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "max_concurrent_videos", "max_waiting_videos", "keep_videos_s")


@dataclass(frozen=True, kw_only=True)
class ClipSettings(ClipLimits):
    """``database_url`` is an async SQLAlchemy URL; by default SQLite in ``data_dir``, where the clips lie as well.

    A runner claims a clip for ``lease_s`` and renews the claim while it lives; another one, or its successor, takes
    the clip over when the claim has run out. Runners on several machines need clocks that differ by less than that.
    A clip is tried ``max_attempts`` times, with ``retry_s`` between. Progress is written at most every ``progress_s``;
    new clips of other processes are looked for every ``poll_s``. Folders without a record, and half-written files, are
    deleted when they were that for ``orphan_s``. ``num_gangs`` make clips of a model side by side, where it is not one.
    """

    data_dir: Path
    database_url: str = ""
    lease_s: float = 10.0
    poll_s: float = 1.0
    progress_s: float = 0.5
    max_attempts: int = 3
    retry_s: float = 5.0
    orphan_s: float = 3600.0
    num_gangs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ClipLimits.__post_init__(self)
        check_positive(self, "lease_s", "poll_s", "max_attempts")

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.database_file}"

    @property
    def database_file(self) -> Path:
        """Where SQLite keeps the records, unless ``database_url`` says otherwise."""
        return self.data_dir.resolve() / DATABASE
