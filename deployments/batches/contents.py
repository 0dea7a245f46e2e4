"""The content of files of batches: in a folder, or in object storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from deployments.clips.objects import Bucket, StoredObject
from deployments.clips.storage import data_folder
from deployments.places import make_folder, make_private, write_privately

PREFIX = "batches"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Files by their names, in object storage or on the disk. Blocks: not for an event loop.

    A file is there whole or not at all. StorageFullError or StorageLostError if they cannot be used now.
    """

    root: Path
    """Folder of the files, if there is no ``bucket``."""
    bucket: Bucket | None = None
    """Object storage; None: files are below ``root``."""

    def write(self, name: str, data: bytes) -> None:
        if self.bucket is not None:
            self.bucket.write(f"{PREFIX}/{name}", data)
            return
        with data_folder(self.root):
            make_private(self.root)
            write_privately(self.root, self.root / name, data)

    def join(self, name: str, parts: Iterable[str]) -> int:
        """Write a file of all ``parts``, which are names of files, without reading them at once. Return its size."""
        if self.bucket is not None:
            return self.bucket.join(f"{PREFIX}/{name}", [f"{PREFIX}/{part}" for part in parts])
        path = self.root / f".{name}.{uuid4().hex[:8]}"
        with data_folder(self.root):
            make_folder(self.root)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                for part in parts:
                    with (self.root / part).open("rb") as source:
                        shutil.copyfileobj(source, file)
                num_bytes = file.tell()
            path.replace(self.root / name)
        return num_bytes

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is not there."""
        try:
            if self.bucket is not None:
                return self.bucket.read(f"{PREFIX}/{name}")
            with data_folder(self.root, but=FileNotFoundError):
                return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def find(self, name: str) -> Path | StoredObject | None:
        if self.bucket is not None:
            return self.bucket.find(f"{PREFIX}/{name}")
        path = self.root / name
        return path if path.is_file() else None

    def names(self, folder: str) -> set[str]:
        """Return the names of the files and folders in ``folder``, without it."""
        if self.bucket is not None:
            prefix = f"{PREFIX}/{folder}".rstrip("/")
            return {one.name.removeprefix(f"{prefix}/").partition("/")[0] for one in self.bucket.list(prefix)}
        path = self.root / folder
        return {one.name for one in path.iterdir() if one.name[0] != "."} if path.is_dir() else set()

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all files in it."""
        if self.bucket is not None:
            self.bucket.remove(f"{PREFIX}/{name}", *(one.name for one in self.bucket.list(f"{PREFIX}/{name}")))
        elif (self.root / name).is_dir():
            shutil.rmtree(self.root / name, ignore_errors=True)
        else:
            with data_folder(self.root):
                (self.root / name).unlink(missing_ok=True)
