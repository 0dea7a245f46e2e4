"""Pictures that clients fetch by URL: stored for a while, and never more than fit."""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from deployments.clips.objects import Bucket, StoredObject
from deployments.clips.storage import data_folder
from deployments.places import make_private, write_privately

Name = TypeVar("Name", str, Path)
NAME = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")
SWEEP_EVERY_S = 60.0
"""Interval of sweeps of object storage, each of which lists all files."""
OWN = re.compile(rf"{NAME.pattern}|\.{NAME.pattern}\.[0-9a-f]{{8}}")
"""With the names under which ``write_atomically`` begins a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileShelf:
    """Pictures that answers name by URL, on the disk.

    Names hold 128 random bits. A client that knows a name may read the file, as with OpenAI's signed URLs. It may not
    if it sends another key than the one that made the file. Each key has a folder of its own. Errors of the disk are
    raised as StorageFullError or StorageLostError, never as OSError.
    """

    folder: Path
    """Folder of the pictures."""
    lifetime_s: float
    """Seconds after which a file is deleted."""
    max_bytes: int
    """Size of all files, above which the oldest are deleted."""

    def put(self, data: bytes, suffix: str, key_hash: str = "") -> str:
        """Store ``data`` for a key's holder and return its name."""
        name = f"{secrets.token_hex(16)}.{suffix}"
        with data_folder(self.folder):
            make_private(self.folder)
            self.sweep(len(data))
            write_privately(self.folder, self.folder / key_hash / name, data)
        return name

    def find(self, name: str, key_hash: str | None = None) -> Path | None:
        """Return the path of ``name``; None if it is unknown, expired, or of another key than the given one."""
        if not NAME.fullmatch(name):
            return None
        with data_folder(self.folder):
            any_key = (self.folder / name, *self.folder.glob(f"*/{name}"))
            for path in any_key if key_hash is None else (self.folder / key_hash / name,):
                stat = _stat(path)
                if stat is not None and time.time() - stat.st_mtime < self.lifetime_s:
                    return path
        return None

    def url(self, name: str, files_url: str) -> str:
        """Return the URL of ``name``, below that of the server's files."""
        return f"{files_url}/{name}"

    def sweep(self, num_new_bytes: int = 0) -> None:
        """Delete expired and half-written files, then the oldest, until ``num_new_bytes`` more fit."""
        own = [path for path in self.folder.rglob("*") if OWN.fullmatch(path.name)]
        files = [(stat.st_mtime, stat.st_size, path) for path in own if (stat := _stat(path)) is not None]
        for path in old_files(files, self.lifetime_s, self.max_bytes - num_new_bytes):
            path.unlink(missing_ok=True)


@dataclass(kw_only=True, slots=True)
class ObjectShelf:
    """``FileShelf`` in object storage. A name holds 96 random bits, and 32 of the hash of its API key."""

    bucket: Bucket
    """Bucket of the objects."""
    lifetime_s: float
    """Seconds after which a file is deleted."""
    max_bytes: int
    """Size of all files, above which the oldest are deleted."""
    signs: bool = False
    """Its URLs are signed ones of the storage."""
    _swept_s: float = field(default=-math.inf, init=False)
    """Time of the last deletion of old objects, by the monotonic clock."""

    def put(self, data: bytes, suffix: str, key_hash: str = "") -> str:
        """Store ``data`` for a key's holder and return its name."""
        name = f"{secrets.token_hex(12)}{_tag(key_hash)}.{suffix}"
        self.bucket.write(f"files/{name}", data)
        if time.monotonic() - self._swept_s > SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            self.sweep()
        return name

    def find(self, name: str, key_hash: str | None = None) -> StoredObject | None:
        """Return the object ``name``; None if it is unknown, expired, or of another key than the given one."""
        if not NAME.fullmatch(name) or (key_hash is not None and name[24:32] != _tag(key_hash)):
            return None
        found = self.bucket.find(f"files/{name}")
        return found if found is not None and time.time() - found.modified_s < self.lifetime_s else None

    def url(self, name: str, files_url: str) -> str:
        """Return the URL of ``name``: signed, or below that of the server's files."""
        content_type = f"image/{name.rpartition('.')[2]}"
        signed = self.signs and self.bucket.sign(f"files/{name}", self.lifetime_s, content_type)
        return signed or f"{files_url}/{name}"

    def sweep(self) -> None:
        """Delete expired objects, then the oldest, until ``max_bytes`` remain."""
        found = [one for one in self.bucket.list("files") if NAME.fullmatch(one.name.rpartition("/")[2])]
        files = [(one.modified_s, one.num_bytes, one.name) for one in found]
        self.bucket.remove(*old_files(files, self.lifetime_s, self.max_bytes))


def _tag(key_hash: str) -> str:
    return hashlib.sha256(key_hash.encode()).hexdigest()[:8]


def old_files(files: Iterable[tuple[float, int, Name]], lifetime_s: float, max_bytes: int) -> Iterator[Name]:
    """Yield names of ``files`` (time, size, name): those past ``lifetime_s``, then the oldest above ``max_bytes``."""
    files = sorted(files)
    num_bytes = sum(size for _, size, _ in files)
    for modified_s, size, name in files:
        if time.time() - modified_s < lifetime_s and num_bytes <= max_bytes:
            break
        yield name
        num_bytes -= size


def _stat(path: Path) -> os.stat_result | None:
    """Return the file's status, or None if it is gone: requests and replicas sweep the folder concurrently."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
