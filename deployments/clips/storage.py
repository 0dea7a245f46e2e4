"""Files of clips, and failures of their disk: it is full, or files are gone."""

from __future__ import annotations

import errno
import io
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from sqlalchemy import exc

from deployments.places import make_private, write_privately
from pipelines.request import InputPicture, InputPictures, InputSound, InputVideo, MediaRequest

MIN_FREE_BYTES = 32 << 20
"""Below this the disk counts as full. The rest is for records of running clips and for deletions."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
SINGLE_FILE = frozenset({errno.EFBIG, errno.ENAMETOOLONG})
"""Errors of one file: a retry cannot help, and other files are not affected."""
Variant = Literal["video", "thumbnail", "preview"]
FILE_NAMES: dict[Variant, str] = {"video": "clip.mp4", "thumbnail": "thumbnail.webp", "preview": "preview.png"}
CONTENT_TYPES: dict[Variant, str] = {"video": "video/mp4", "thumbnail": "image/webp", "preview": "image/png"}
MASK_NAME, VIDEO_NAME, VIDEO_MASK_NAME = "input-mask.png", "input-video.rgb", "input-video-mask.rgb"
SOUND_HEAD = struct.Struct("<II")
"""Rate and channels of a sound, before its samples."""
PNG_LEVEL = 0
"""No compression, for speed: the files are deleted with the finished clip."""
DATABASE_FAILURES = (exc.DBAPIError, exc.TimeoutError)
"""Errors of a database that is unavailable or locked, or whose connection pool is exhausted."""


class StorageFullError(Exception):
    """There is no room for records or files of clips."""


class StorageLostError(Exception):
    """Records or files of clips are unreachable: their database or folder is gone."""


UNAVAILABLE = (*DATABASE_FAILURES, StorageFullError, StorageLostError)
"""Errors of records or files that cannot be used now."""


def is_full(failure: BaseException) -> bool:
    """Return whether ``failure`` means a full disk."""
    return isinstance(failure, StorageFullError) or (isinstance(failure, OSError) and failure.errno in FULL)


def is_lost(failure: BaseException) -> bool:
    """Return whether ``failure`` means that files or records are unreachable now, whatever they hold."""
    if isinstance(failure, exc.DataError | exc.IntegrityError | exc.ProgrammingError):
        return False
    return isinstance(failure, (StorageLostError, *DATABASE_FAILURES))


@contextmanager
def data_folder(folder: Path, *, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Raise StorageFullError or StorageLostError for an OSError of ``folder`` inside the block.

    Such an error comes from the folder, not the content. Errors without a number (an undecodable picture), errors of a
    single file, and the kind ``but`` pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in SINGLE_FILE or isinstance(error, but):
            raise
        if error.errno in FULL:
            raise StorageFullError(f"there is no room in {folder}: {os.strerror(error.errno)}") from error
        raise StorageLostError(f"the folder {folder} cannot be used: {os.strerror(error.errno)}") from error


def storage_problem(*folders: Path) -> StorageFullError | StorageLostError | None:
    """Return why one of ``folders`` cannot be written; None if all can.

    Each is written to, since a read-only file system still reports free space.
    """
    for folder in folders:
        try:
            with data_folder(folder):
                _write_to(folder)
        except (StorageFullError, StorageLostError) as problem:
            return problem
    return None


def _write_to(folder: Path) -> None:
    """Write a byte to a file of ``folder`` that has no name. StorageFullError if little room is left."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except FileNotFoundError:  # created with the first file
        return
    if free_bytes < MIN_FREE_BYTES:
        left, needed = f"{free_bytes >> 20} MiB", f"{MIN_FREE_BYTES >> 20} MiB"
        raise StorageFullError(
            f"the disk of {folder} has {left} left, and {needed} are needed: delete clips, or make room"
        )
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(b"\0")


@dataclass(kw_only=True, slots=True)
class Orphans:
    """Folders without a record, and partly written files, which are deleted.

    They are given time: a file may still be written, and a wrong database URL may be corrected.
    """

    root: Path
    """Folder of the clips' folders."""
    patience_s: float
    """Age at which they are deleted."""
    _since_s: dict[Path, float] = field(default_factory=dict, init=False)
    """Time at which each was first seen."""

    def folders(self) -> list[str]:
        """Return the ids that have a folder."""
        return [path.name for path in self.root.iterdir()] if self.root.is_dir() else []

    def sweep(self, unknown_ids: set[str]) -> None:
        """Delete folders of ``unknown_ids`` and partial files that were orphans for ``patience_s``."""
        orphans = {self.root / clip_id for clip_id in unknown_ids}
        for name in self.folders():
            with suppress(FileNotFoundError):  # the clip was deleted meanwhile
                orphans.update((self.root / name).glob(".*"))
        now_s = time.monotonic()
        self._since_s = {path: self._since_s.get(path, now_s) for path in orphans}
        for path, since_s in self._since_s.items():
            if now_s - since_s >= self.patience_s:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipFolders:
    """The folders of all clips. Raises StorageFullError or StorageLostError, never OSError."""

    root: Path
    """Folder of the clips' folders."""

    def path(self, clip_id: str, variant: Variant) -> Path:
        return self.root / clip_id / FILE_NAMES[variant]

    def write(self, clip_id: str, variant: Variant, data: bytes) -> None:
        with data_folder(self.root):
            write_privately(self.root, self.path(clip_id, variant), data)

    def find(self, clip_id: str, variant: Variant) -> Path | None:
        """Return the path of a file, if it exists. StorageLostError if ``root`` is gone: it may come back."""
        path = self.path(clip_id, variant)
        with data_folder(self.root):
            if path.is_file():
                return path
        if not self.root.is_dir():
            raise _lost_folder(self.root)
        return None

    def prepare(self) -> None:
        make_private(self.root)

    def problem(self) -> StorageFullError | StorageLostError | None:
        """Return why nothing can be written now; None if it can."""
        return storage_problem(self.root)

    def orphans(self, patience_s: float) -> Orphans:
        return Orphans(root=self.root, patience_s=patience_s)

    def write_inputs(self, clip_id: str, inputs: InputPictures) -> None:
        """Write input pictures and clip, lossless."""
        for name, data in input_files(inputs):
            with data_folder(self.root):
                write_privately(self.root, self.root / clip_id / name, data)

    def read_inputs(self, clip_id: str, request: MediaRequest) -> InputPictures:
        """Return what ``write_inputs`` wrote. FileNotFoundError if missing; StorageLostError if ``root`` is."""
        if not self.root.is_dir():
            raise _lost_folder(self.root)
        with data_folder(self.root, but=FileNotFoundError):
            return inputs_of(request, lambda name: (self.root / clip_id / name).read_bytes())

    def remove_inputs(self, clip_id: str) -> None:
        with suppress(OSError):  # at the latest, they are deleted with the clip's folder
            for path in (self.root / clip_id).glob("input-*"):
                path.unlink(missing_ok=True)

    def remove(self, clip_id: str) -> None:
        """Delete all files of the clip, if there are any."""
        shutil.rmtree(self.root / clip_id, ignore_errors=True)


def input_files(inputs: InputPictures) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files that hold the inputs of a clip's request."""
    for index, picture in enumerate(inputs.pictures):
        yield input_name(index), png(picture)
    if inputs.mask is not None:
        yield MASK_NAME, png(inputs.mask)
    if inputs.video is not None:
        yield VIDEO_NAME, inputs.video.data
    for index, video in enumerate(inputs.further_videos, 1):
        yield further_name(index), video.data
    for index, video in enumerate(inputs.videos):
        if video.sound is not None:
            yield sound_name(index), sound_bytes(video.sound)
    if inputs.video_mask is not None:
        yield VIDEO_MASK_NAME, inputs.video_mask.data


def inputs_of(request: MediaRequest, read: Callable[[str], bytes]) -> InputPictures:
    """Return the content of the files of ``input_files``, which ``read`` returns by name."""
    pictures = tuple(read_png(read(input_name(index))) for index in range(request.num_pictures))
    if not request.num_video_frames:
        return InputPictures(pictures=pictures, mask=read_png(read(MASK_NAME)) if request.has_mask else None)
    sounds = (read_sound(read(sound_name(index))) if one else None for index, one in enumerate(request.sound_samples))
    videos = [video_of(request, read(VIDEO_NAME))]
    for index, number in enumerate(request.further_video_frames, 1):
        videos.append(replace(video_of(request, read(further_name(index))), num_frames=number))
    first, *further = [replace(video, sound=sound) for video, sound in zip_longest(videos, sounds)]
    mask = video_of(request, read(VIDEO_MASK_NAME)) if request.has_mask else None
    return InputPictures(pictures=pictures, video=first, further_videos=tuple(further), video_mask=mask)


def video_of(request: MediaRequest, data: bytes) -> InputVideo:
    """Return the input clip with ``request``, or its mask, from the pixels."""
    num_frames = request.num_video_frames
    return InputVideo(width=request.width, height=request.height, num_frames=num_frames, fps=request.fps, data=data)


def further_name(index: int) -> str:
    return f"input-video-{index}.rgb"


def sound_name(index: int) -> str:
    return f"input-sound-{index}.f32"


def sound_bytes(sound: InputSound) -> bytes:
    return SOUND_HEAD.pack(sound.rate, sound.num_channels) + sound.data


def read_sound(data: bytes) -> InputSound:
    """Return what ``sound_bytes`` wrote."""
    rate, num_channels = SOUND_HEAD.unpack_from(data)
    return InputSound(num_channels=num_channels, rate=rate, data=data[SOUND_HEAD.size :])


def input_name(index: int) -> str:
    return f"input-{index}.png"


def png(picture: InputPicture) -> bytes:
    file = io.BytesIO()
    picture.image().save(file, "png", compress_level=PNG_LEVEL)
    return file.getvalue()


def read_png(data: bytes) -> InputPicture:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        return InputPicture.of(image)


def _lost_folder(root: Path) -> StorageLostError:
    return StorageLostError(f"the folder {root} does not exist: is its disk mounted?")
