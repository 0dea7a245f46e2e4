"""Settings of the runner of clips."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """``database_url`` is an async SQLAlchemy URL; by default SQLite in ``data_dir``, where the clips lie as well.

    A runner claims a clip for ``lease_s`` and renews the claim while it lives; another one, or its successor, takes
    the clip over when the claim has run out. Runners on several machines need clocks that differ by less than that.
    ``max_running`` clips are made side by side in one runner, ``max_waiting`` wait in all. A clip is tried
    ``max_attempts`` times, with ``retry_s`` between. Progress is written at most every ``progress_s``; new clips of
    other processes are looked for every ``poll_s``. Finished clips are deleted after ``keep_s``, if that is not None.
    """

    data_dir: Path
    database_url: str = ""
    lease_s: float = 10.0
    poll_s: float = 1.0
    progress_s: float = 0.5
    max_running: int = 2
    max_waiting: int = 100
    max_attempts: int = 3
    retry_s: float = 5.0
    keep_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("lease_s", "poll_s", "max_running", "max_waiting", "max_attempts"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir.resolve() / 'jobs.sqlite3'}"
