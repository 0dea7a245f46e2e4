"""The files of a job: one folder each, every file whole or absent."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.core.files import write_atomically

Variant = Literal["video", "thumbnail", "preview"]

FILE_NAMES: dict[Variant, str] = {"video": "clip.mp4", "thumbnail": "thumbnail.webp", "preview": "preview.png"}
CONTENT_TYPES: dict[Variant, str] = {"video": "video/mp4", "thumbnail": "image/webp", "preview": "image/png"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolders:
    root: Path

    def path(self, job_id: str, variant: Variant) -> Path:
        return self.root / job_id / FILE_NAMES[variant]

    def write(self, job_id: str, variant: Variant, data: bytes) -> None:
        write_atomically(self.path(job_id, variant), data)

    def remove(self, job_id: str) -> None:
        """Delete all files of the job, if there are any."""
        shutil.rmtree(self.root / job_id, ignore_errors=True)
