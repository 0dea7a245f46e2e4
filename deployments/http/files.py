"""Pictures that clients fetch by URL: stored for a while, and never more than fit."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deployments.clips.storage import data_folder
from deployments.places import make_private, write_privately

NAME = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")
OWN = re.compile(rf"{NAME.pattern}|\.{NAME.pattern}\.[0-9a-f]{{8}}")
"""With the names under which ``write_atomically`` begins a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileShelf:
    """Files in ``folder``, gone ``lifetime_s`` after they were written, the oldest first if above ``max_bytes``.

    Names hold 128 random bits: who knows one may read the file, as with the signed URLs of OpenAI, but for holders of
    other keys than that it was made with. What was made with a key lies in a folder of that key's. What fails
    there is a StorageFullError or StorageLostError, never an OSError.
    """

    folder: Path
    lifetime_s: float
    max_bytes: int

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

    def sweep(self, num_new_bytes: int = 0) -> None:
        """Delete expired and half-written files, then the oldest, until ``num_new_bytes`` more fit."""
        own = [path for path in self.folder.rglob("*") if OWN.fullmatch(path.name)]
        sweep(own, self.lifetime_s, self.max_bytes, num_new_bytes)


def sweep(paths: Iterable[Path], lifetime_s: float, max_bytes: int, num_new_bytes: int) -> None:
    """Delete those of ``paths`` older than ``lifetime_s``, then the oldest, until ``num_new_bytes`` more fit."""
    stats = ((path, _stat(path)) for path in paths)
    files = sorted((stat.st_mtime, stat.st_size, path) for path, stat in stats if stat is not None)
    num_bytes = sum(size for _, size, _ in files) + num_new_bytes
    for modified_s, size, path in files:
        if time.time() - modified_s < lifetime_s and num_bytes <= max_bytes:
            break
        path.unlink(missing_ok=True)
        num_bytes -= size


def _stat(path: Path) -> os.stat_result | None:
    """Return the file's status, or None if it is gone: requests and replicas sweep the folder concurrently."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
