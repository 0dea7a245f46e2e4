"""Servers that ``troupe serve`` started on this machine: a file for each, locked for as long as its process lives."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from deployments.cli.progress import console
from deployments.places import make_private, make_private_file
from deployments.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """``metrics_url`` is empty where it shows none."""

    pid: int
    url: str
    metrics_url: str

    @property
    def port(self) -> int | None:
        return urlsplit(self.url).port


def folder() -> Path:
    """Return where the files are: in the data directory of the environment, whatever configurations say."""
    return Settings().data_dir / "servers"


_own: list[TextIO] = []
"""Open, and so locked, until this process has ended, however it does."""


def announce(url: str, metrics_url: str = "") -> None:
    """Let other commands find this process as the server at ``url``, as long as it runs."""
    file = file_of(url)
    try:
        make_private(file.parent)
        make_private_file(file)
        record = file.open("a+")
    except OSError as error:
        console.print(f"Other commands will not find this server: {error}", soft_wrap=True)
        return
    fcntl.flock(record, fcntl.LOCK_EX)
    record.truncate(0)
    record.write(json.dumps(asdict(Server(pid=os.getpid(), url=url, metrics_url=metrics_url))))
    record.flush()
    _own.append(record)


def file_of(url: str) -> Path:
    parts = urlsplit(url)
    return folder() / f"{parts.hostname}_{parts.port}.json"


def servers() -> list[Server]:
    """Return those that run, by port. A file whose process has ended says nothing."""
    running = [server for file in folder().glob("*.json") if (server := _read(file))]
    return sorted(running, key=lambda server: server.port or 0)


def the_server(port: int | None = None) -> Server:
    """Return the one that listens on ``port``, or the only one. ValueError says which there are."""
    running = servers()
    chosen = [server for server in running if port in (None, server.port)]
    if len(chosen) == 1:
        return chosen[0]
    if not running:
        raise ValueError(f"no server runs here that `troupe serve` started ({folder()} knows of none)")
    listed = ", ".join(server.url for server in running)
    if not chosen:
        raise ValueError(f"no server that `troupe serve` started listens on port {port}; there is {listed}")
    raise ValueError(f"several servers run here: {listed}; say which")


def _read(file: Path) -> Server | None:
    try:
        with file.open() as record:
            return Server(**json.load(record)) if _is_locked(record) else None
    except (FileNotFoundError, json.JSONDecodeError):  # it begins just now, or another command has cleaned up
        return None


def _is_locked(record: TextIO) -> bool:
    try:
        fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
