"""The files of clips: one folder each, every file whole or absent."""

from __future__ import annotations

import io
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deployments.clips.storage import StorageLostError, data_folder
from deployments.places import write_privately
from pipelines.pictures import InputPicture, InputPictures

Variant = Literal["video", "thumbnail", "preview"]

FILE_NAMES: dict[Variant, str] = {"video": "clip.mp4", "thumbnail": "thumbnail.webp", "preview": "preview.png"}
CONTENT_TYPES: dict[Variant, str] = {"video": "video/mp4", "thumbnail": "image/webp", "preview": "image/png"}

MASK_NAME = "input-mask.png"
PNG_LEVEL = 0
"""No compression, for speed: the files are deleted with the finished clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipFolders:
    """The folders of all clips in ``root``. Raises StorageFullError or StorageLostError, never OSError."""

    root: Path

    def path(self, clip_id: str, variant: Variant) -> Path:
        return self.root / clip_id / FILE_NAMES[variant]

    def write(self, clip_id: str, variant: Variant, data: bytes) -> None:
        with data_folder(self.root):
            write_privately(self.root, self.path(clip_id, variant), data)

    def has(self, clip_id: str, variant: Variant) -> bool:
        """Return whether the file exists. StorageLostError if ``root`` is gone: it may come back."""
        with data_folder(self.root):
            if self.path(clip_id, variant).is_file():
                return True
        if not self.root.is_dir():
            raise lost(self.root)
        return False

    def write_inputs(self, clip_id: str, inputs: InputPictures) -> None:
        """Write the input pictures of a clip, lossless."""
        files = {input_name(index): picture for index, picture in enumerate(inputs.pictures)}
        if inputs.mask is not None:
            files[MASK_NAME] = inputs.mask
        for name, picture in files.items():
            data = png(picture)
            with data_folder(self.root):
                write_privately(self.root, self.root / clip_id / name, data)

    def read_inputs(self, clip_id: str, num_pictures: int, has_mask: bool) -> InputPictures:
        """Return what ``write_inputs`` wrote. FileNotFoundError if missing; StorageLostError if ``root`` is."""
        if not self.root.is_dir():
            raise lost(self.root)
        folder = self.root / clip_id
        with data_folder(self.root, but=FileNotFoundError):
            pictures = tuple(read_png(folder / input_name(index)) for index in range(num_pictures))
            return InputPictures(pictures=pictures, mask=read_png(folder / MASK_NAME) if has_mask else None)

    def remove_inputs(self, clip_id: str) -> None:
        with suppress(OSError):  # they go with the clip's folder at the latest
            for path in (self.root / clip_id).glob("input-*.png"):
                path.unlink(missing_ok=True)

    def remove(self, clip_id: str) -> None:
        """Delete all files of the clip, if there are any."""
        shutil.rmtree(self.root / clip_id, ignore_errors=True)


def input_name(index: int) -> str:
    return f"input-{index}.png"


def png(picture: InputPicture) -> bytes:
    file = io.BytesIO()
    picture.image().save(file, "png", compress_level=PNG_LEVEL)
    return file.getvalue()


def read_png(path: Path) -> InputPicture:
    from PIL import Image

    with Image.open(path, formats=("PNG",)) as image:
        return InputPicture.of(image)


def lost(root: Path) -> StorageLostError:
    return StorageLostError(f"the folder {root} is not there: is its disk mounted?")
