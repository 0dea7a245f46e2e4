"""Settings of the runner of clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deployments.checks import check_positive
from deployments.clips.webhooks import WebhookSettings

DATABASE = "jobs.sqlite3"


@dataclass(frozen=True, kw_only=True)
class ClipLimits:
    """Configurable limits of clips. No slots: the configuration's section has a second dataclass as parent."""

    max_concurrent_videos: int = 2
    """Clips that one runner makes concurrently."""
    max_waiting_videos: int = 100
    """Clips that may be queued."""
    keep_videos_s: float | None = None
    """Age at which finished clips are deleted; None keeps them."""

    def __post_init__(self) -> None:
        check_positive(self, "max_concurrent_videos", "max_waiting_videos", "keep_videos_s")


@dataclass(frozen=True, kw_only=True)
class ClipSettings(ClipLimits):
    """Settings of a runner."""

    data_dir: Path
    """Folder of the database and of files, unless these are elsewhere."""
    database_url: str = ""
    """URL of a database (``Database``); by default SQLite in ``data_dir``."""
    storage: str = ""
    """URL of object storage for files; by default they are in ``data_dir``."""
    lease_s: float = 10.0
    """Duration of a claim; then another runner takes the clip over. Clocks of machines must differ by less."""
    poll_s: float = 1.0
    """Interval of looks for clips to claim."""
    progress_s: float = 0.5
    """Interval of progress reports."""
    max_attempts: int = 3
    """Runs of a clip before it fails; a runner that dies uses up one."""
    retry_s: float = 5.0
    """Time before a failed clip is retried."""
    orphan_s: float = 3600.0
    """Time from the look that finds folders without a record, or partial files, until they are deleted."""
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)
    """Where messages may go."""
    num_gangs: Mapping[str, int] = field(default_factory=dict)
    """Gangs by model; 1 for others."""

    def __post_init__(self) -> None:
        ClipLimits.__post_init__(self)
        check_positive(self, "lease_s", "poll_s", "max_attempts")

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite:///{self.database_file}"

    @property
    def database_file(self) -> Path:
        """The SQLite file, used unless ``database_url`` is set."""
        return self.data_dir.resolve() / DATABASE
