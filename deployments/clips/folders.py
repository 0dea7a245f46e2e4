"""The files of clips: one folder each, every file whole or absent."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deployments.clips.storage import StorageLostError
from engines.core.files import write_atomically

Variant = Literal["video", "thumbnail", "preview"]

FILE_NAMES: dict[Variant, str] = {"video": "clip.mp4", "thumbnail": "thumbnail.webp", "preview": "preview.png"}
CONTENT_TYPES: dict[Variant, str] = {"video": "video/mp4", "thumbnail": "image/webp", "preview": "image/png"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipFolders:
    root: Path

    def path(self, clip_id: str, variant: Variant) -> Path:
        return self.root / clip_id / FILE_NAMES[variant]

    def write(self, clip_id: str, variant: Variant, data: bytes) -> None:
        write_atomically(self.path(clip_id, variant), data)

    def has(self, clip_id: str, variant: Variant) -> bool:
        """Returns whether the file is there. StorageLostError if no clip's is: then it may be there again later."""
        if self.path(clip_id, variant).is_file():
            return True
        if not self.root.is_dir():
            raise StorageLostError(f"the folder {self.root} is not there: is its disk mounted?")
        return False

    def remove(self, clip_id: str) -> None:
        """Deletes all files of the clip, if there are any."""
        shutil.rmtree(self.root / clip_id, ignore_errors=True)
