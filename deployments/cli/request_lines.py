"""Console lines of the requests that this process's server has answered."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

POLL_S = 0.25
HEAD_BYTES = 512
MARK = '"logger": "troupe.access"'
"""Part of the log lines of requests (``deployments.http.middleware``)."""


class LogFormat(StrEnum):
    json = "json"
    plain = "plain"


def logs_folder() -> Path:
    """Return the folder with the logs of this process's cluster."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return Path(nodes[0]["ObjectStoreSocketName"]).parents[1] / "logs"


def show_requests(folder: Path, log_format: LogFormat, write: Callable[[str], object]) -> None:
    """Start a thread that calls ``write`` with a line for each request."""
    follower = Follower(folder)

    def run() -> None:
        while True:
            for line in follower.new_lines():
                if text := format_line(line, log_format):
                    write(text)
            time.sleep(POLL_S)

    threading.Thread(target=run, daemon=True, name="requests").start()


class Follower:
    """Reads whole lines that are appended to the logs of a folder after its construction.

    Ray renames a full log and opens a new one. Files are therefore identified by inode, and by their first bytes, since
    inodes are reused.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = dict[int, tuple[bytes, int]]()
        """First bytes of each file and number of bytes read, by inode."""
        for _ in self.new_lines():
            pass

    def new_lines(self) -> Iterator[str]:
        """Yield the lines about requests since the last call."""
        found = list[tuple[int, int, BinaryIO]]()
        log: BinaryIO
        with ExitStack() as stack:
            for file in self._files():
                with suppress(FileNotFoundError):  # Ray has just renamed it
                    log = stack.enter_context(file.open("rb"))
                    stat = os.fstat(log.fileno())
                    found.append((stat.st_mtime_ns, stat.st_ino, log))
            inodes = {inode for _, inode, _ in found}
            self._read = {inode: position for inode, position in self._read.items() if inode in inodes}
            for _, inode, log in sorted(found, key=lambda one: one[:2]):  # renamed logs are older
                yield from (line for line in self._added(inode, log).splitlines() if MARK in line)

    def _added(self, inode: int, log: BinaryIO) -> str:
        before, begin = self._read.get(inode, (b"", 0))
        head, num_bytes = log.read(HEAD_BYTES), os.fstat(log.fileno()).st_size
        if not head.startswith(before) or num_bytes < begin:
            begin = 0
        log.seek(begin)
        text, newline, _ = log.read(num_bytes - begin).rpartition(b"\n")
        self._read[inode] = head, begin + len(text) + len(newline)
        return text.decode(errors="replace")

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("worker-*.err*"))


def format_line(line: str, log_format: LogFormat) -> str:
    """Return the console line of a log line; empty for a successful ``GET /health``."""
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # two processes wrote at once
        return ""
    if (record["method"], record["path"], record["status"]) == ("GET", "/health", 200):
        return ""
    if log_format is LogFormat.json:
        return line
    clock = record["time"].partition("T")[2][:8] or record["time"]
    path = ascii(record["path"])[1:-1]  # no control sequences for the terminal
    return (
        f"{clock} {record['status']} {record['method']} {path} {record['duration_ms']:.0f} ms "
        f"{record.get('request_id', '')}"
    )
