"""Files for clients: ranges of them, and pictures fetched by URL, stored for a while and never more than fit."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable

from deployments.api.errors import ApiError
from deployments.requests.errors import shown
from engines.core.files import write_atomically

NAME = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")
OWN = re.compile(rf"{NAME.pattern}|\.{NAME.pattern}\.[0-9a-f]{{8}}")
"""With the names under which ``write_atomically`` begins a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileShelf:
    """Files in ``folder``, gone ``lifetime_s`` after they were written, the oldest first if above ``max_bytes``.

    Names hold 128 random bits: who knows one may read the file, as with the signed URLs of OpenAI.
    """

    folder: Path
    lifetime_s: float
    max_bytes: int

    def put(self, data: bytes, suffix: str) -> str:
        """Stores ``data`` and returns the name under which it can be found."""
        self.sweep(len(data))
        name = f"{secrets.token_hex(16)}.{suffix}"
        write_atomically(self.folder / name, data)
        return name

    def find(self, name: str) -> Path | None:
        """Returns where ``name`` lies; None if it is unknown or too old."""
        path = self.folder / name
        stat = _stat(path) if NAME.fullmatch(name) else None
        return path if stat is not None and time.time() - stat.st_mtime < self.lifetime_s else None

    def sweep(self, num_new_bytes: int = 0) -> None:
        """Deletes what is too old, then the oldest, until ``num_new_bytes`` more fit; half-written files, too."""
        stats = ((path, _stat(path)) for path in self.folder.glob("*") if OWN.fullmatch(path.name))
        files = sorted((stat.st_mtime, stat.st_size, path) for path, stat in stats if stat is not None)
        num_bytes = sum(size for _, size, _ in files) + num_new_bytes
        for modified_s, size, path in files:
            if time.time() - modified_s < self.lifetime_s and num_bytes <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            num_bytes -= size


def _stat(path: Path) -> os.stat_result | None:
    """Returns None if there is no such file any more: requests, and replicas that share the folder, sweep together."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


class RangedFile(FileResponse):
    """A file, or the one range of it that was asked for (RFC 9110, section 14). A range that makes no sense is ignored.

    Starlette by itself refuses that one, answers a range beyond the file without an error's body (here it is ApiError
    416), and takes several ranges, in one multipart body.
    """

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            ranges = super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            return []
        except RangeNotSatisfiable:
            message = f"Range is {shown(http_range)}; the file has {file_size} bytes"
            headers = {"Content-Range": f"bytes */{file_size}"}
            raise ApiError(416, message, code="range_not_satisfiable", headers=headers) from None
        return ranges if len(ranges) == 1 else []
