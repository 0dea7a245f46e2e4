"""What can go wrong with the disk under clips: it is full, or what lay on it is gone."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import exc

MIN_FREE_BYTES = 32 << 20
"""Below that the disk counts as full: room for the records of what is under way, and for its deletion."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DATABASE_FAILURES = (exc.DBAPIError, exc.TimeoutError)
"""What the database raises that is away or locked, and its pool of connections that are all waited with."""


class StorageFullError(Exception):
    """There is no room for records or files of clips."""


class StorageLostError(Exception):
    """Records or files of clips cannot be got at: their database or folder is gone."""


def is_full(failure: BaseException) -> bool:
    """Returns whether ``failure`` says that there is no room on the disk."""
    return isinstance(failure, StorageFullError) or (isinstance(failure, OSError) and failure.errno in FULL)


def storage_problem(folder: Path) -> StorageFullError | StorageLostError | None:
    """Returns why nothing more can be kept in ``folder``; None if it can."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except FileNotFoundError:  # made with the first file
        return None
    except OSError as error:
        return StorageLostError(f"the disk of {folder} cannot be looked at: {error.strerror}")
    if free_bytes >= MIN_FREE_BYTES:
        return None
    left, needed = f"{free_bytes >> 20} MiB", f"{MIN_FREE_BYTES >> 20} MiB"
    return StorageFullError(
        f"the disk of {folder} has {left} left, and {needed} are needed: delete clips, or make room"
    )


@dataclass(kw_only=True, slots=True)
class Orphans:
    """What in ``root`` belongs to no clip: folders without a record, and files of which a part was written.

    It is deleted when it was one for ``patience_s``: a file may be just being written, and a database that was pointed
    elsewhere by mistake is to cost nothing that is noticed in time.
    """

    root: Path
    patience_s: float
    _since_s: dict[Path, float] = field(default_factory=dict, init=False)

    def folders(self) -> list[str]:
        """Returns the ids that have a folder."""
        return [path.name for path in self.root.iterdir()] if self.root.is_dir() else []

    def sweep(self, unknown_ids: set[str]) -> None:
        """Deletes the folders of ``unknown_ids``, and partial files everywhere, that were orphans for long enough."""
        orphans = {self.root / clip_id for clip_id in unknown_ids} | set(self.root.glob("*/.*"))
        now_s = time.monotonic()
        self._since_s = {path: self._since_s.get(path, now_s) for path in orphans}
        for path, since_s in self._since_s.items():
            if now_s - since_s >= self.patience_s:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
