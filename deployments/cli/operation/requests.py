"""A line on the console for each request that the server of this process has answered."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

POLL_S = 0.25
MARK = '"logger": "troupe.access"'
"""In the lines that are about a request (``deployments.api.middleware``)."""


class LogFormat(StrEnum):
    json = "json"
    plain = "plain"


def logs_folder() -> Path:
    """Returns where the processes of the cluster that this one has started write their logs."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return Path(nodes[0]["ObjectStoreSocketName"]).parents[1] / "logs"


def show_requests(folder: Path, log_format: LogFormat, write: Callable[[str], object]) -> None:
    """From now on, gives ``write`` a line for each request, as long as this process runs."""
    follower = Follower(folder)

    def run() -> None:
        while True:
            for line in follower.new_lines():
                if shown := format_line(line, log_format):
                    write(shown)
            time.sleep(POLL_S)

    threading.Thread(target=run, daemon=True, name="requests").start()


class Follower:
    """Reads what is added to the logs of a folder, from its own beginning on, by whole lines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes = dict[Path, int]()
        for _ in self.new_lines():
            pass

    def new_lines(self) -> Iterator[str]:
        """Yields the lines about requests that have come since the last call."""
        for file in self._files():
            with suppress(FileNotFoundError):  # Ray has just put it away
                yield from (line for line in self._added(file).splitlines() if MARK in line)

    def _added(self, file: Path) -> str:
        begin, num_bytes = self._read_bytes.get(file, 0), file.stat().st_size
        if num_bytes < begin:  # Ray has begun it anew
            begin = 0
        with file.open("rb") as log:
            log.seek(begin)
            text, newline, _ = log.read(num_bytes - begin).rpartition(b"\n")
        self._read_bytes[file] = begin + len(text) + len(newline)
        return text.decode(errors="replace")

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("worker-*.err"))


def format_line(line: str, log_format: LogFormat) -> str:
    """Returns what to show of a line of log; nothing for a good answer of ``GET /health``, for which nobody
    looks at a console."""
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # two processes wrote at once
        return ""
    if (record["method"], record["path"], record["status"]) == ("GET", "/health", 200):
        return ""
    if log_format is LogFormat.json:
        return line
    clock = record["time"].partition("T")[2][:8] or record["time"]
    path = ascii(record["path"])[1:-1]  # whatever a client sends is no command to the terminal
    return (
        f"{clock} {record['status']} {record['method']} {path} {record['duration_ms']:.0f} ms "
        f"{record.get('request_id', '')}"
    )
