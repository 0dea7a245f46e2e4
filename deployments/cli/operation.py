"""``troupe status``, ``troupe stop`` and ``troupe clips``: the running servers of this machine."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import httpx

from deployments.cli.client import Client
from deployments.cli.local import http_client
from deployments.cli.progress import console
from deployments.cli.tables import print_table
from deployments.places import make_folder, make_private, make_private_file
from deployments.requests.request_errors import printable
from deployments.settings import Settings

POLL_S = 0.1
UNKNOWN = "–"
GAUGES = {"gangs": "troupe_gangs", "running": "troupe_jobs_running", "waiting": "troupe_jobs_waiting"}
"""Names of metrics by column of the table."""
TIMEOUT_S = 10.0
MAX_PROMPT_CHARS = 40

Counts = Mapping[str, Mapping[str, int]]
"""Counts by column and model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server, as its file describes it."""

    pid: int
    """Process of the command that started it."""
    url: str
    """Address for clients."""
    metrics_url: str
    """Empty without metrics."""

    @property
    def port(self) -> int | None:
        return urlsplit(self.url).port


def folder() -> Path:
    """Return the folder of servers' files, in the environment's data directory for all configurations."""
    return Settings().data_dir / "servers"


_locked_files: list[TextIO] = []
"""Files of this process's servers, open and locked until it ends."""


def announce(url: str, metrics_url: str = "") -> None:
    """Register this process as the server at ``url`` for other commands, until it ends."""
    file = file_of(url)
    try:
        make_folder(file.parent.parent)  # the application has not made it yet
        make_private(file.parent)
        make_private_file(file)
        record = file.open("a+")
    except OSError as error:
        console.print(f"Other commands will not find this server: {error}")
        return
    fcntl.flock(record, fcntl.LOCK_EX)
    record.truncate(0)
    record.write(json.dumps(asdict(Server(pid=os.getpid(), url=url, metrics_url=metrics_url))))
    record.flush()
    _locked_files.append(record)


def file_of(url: str) -> Path:
    parts = urlsplit(url)
    return folder() / f"{parts.hostname}_{parts.port}.json"


def servers() -> list[Server]:
    """Return the running servers, sorted by port. Files of ended processes are ignored."""
    running = [server for file in folder().glob("*.json") if (server := _read(file))]
    return sorted(running, key=lambda server: server.port or 0)


def the_server(port: int | None = None) -> Server:
    """Return the server on ``port``, or the only one. ValueError lists the running servers."""
    running = servers()
    chosen = [server for server in running if port in (None, server.port)]
    if len(chosen) == 1:
        return chosen[0]
    if not running:
        raise ValueError(f"no server runs here that `troupe serve` started (none in {folder()})")
    listed = ", ".join(server.url for server in running)
    if not chosen:
        raise ValueError(f"no server that `troupe serve` started listens on port {port}; there is {listed}")
    raise ValueError(f"several servers run here: {listed}; choose one by --url, or by --port of `troupe stop`")


def _read(file: Path) -> Server | None:
    try:
        with file.open() as record:
            return Server(**json.load(record)) if _is_locked(record) else None
    except (FileNotFoundError, json.JSONDecodeError):  # the server is starting, or its file was just deleted
        return None


def _is_locked(record: TextIO) -> bool:
    try:
        fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def stop(port: int | None, timeout_s: float) -> None:
    """Stop the server on ``port``, or the only one, and wait for its end.

    ValueError as for ``the_server``, RuntimeError if it still runs after ``timeout_s``.
    """
    server, start_s = the_server(port), time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    while server in servers():
        if time.monotonic() - start_s > timeout_s:
            raise RuntimeError(
                f"{server.url} (process {server.pid}) still runs {timeout_s:g} s after SIGTERM: its requests may not "
                f"be done; `kill -9 {server.pid}` ends it at once"
            )
        time.sleep(POLL_S)
    file_of(server.url).unlink(missing_ok=True)
    took_s = time.monotonic() - start_s
    console.print(f"{server.url} (process {server.pid}) ended after {took_s:.1f} s")


def print_status(url: str, api_key: str, metrics_url: str, *, as_json: bool = False) -> bool:
    """Print a line for each model, or one JSON object. Return whether all models are ready.

    Without ``url``, use ``the_server``, with its ValueError. httpx's errors if the server does not answer.
    """
    if not url:
        server = the_server()
        url, metrics_url = server.url, metrics_url or server.metrics_url
    with Client(url, api_key) as client:
        health = client.health()
        cards = {card["id"]: card for card in client.models()}
    counts = _counts(metrics_url)
    is_ready = bool(health) and all(state == "ready" for state in health.values())
    if as_json:
        states = [_document(model, state, cards, counts) for model, state in health.items()]
        print(json.dumps({"url": url, "ready": is_ready, "models": states}, indent=2))
        return is_ready
    rows = []
    for model, state in health.items():
        numbers = (str(counts[column].get(model, 0)) if counts else UNKNOWN for column in GAUGES)
        kinds = ", ".join(cards[model]["kinds"]) if model in cards else UNKNOWN
        rows.append((model, kinds, *numbers, state))
    console.print(f"{url} is {'ready' if is_ready else 'not ready'}")
    print_table(("model", "kind", *GAUGES, "state"), rows)
    if not counts:
        where = f"{metrics_url} does not answer" if metrics_url else "give --metrics-url"
        console.print(f"No numbers of gangs and jobs: {where}")
    return is_ready


def _document(model: str, state: str, cards: Mapping[str, dict[str, Any]], counts: Counts) -> dict[str, Any]:
    """Return a model's state as a JSON object; unknown values are null."""
    numbers = {column: counts[column].get(model, 0) if counts else None for column in GAUGES}
    return {"id": model, "kinds": cards[model]["kinds"] if model in cards else None, **numbers, "state": state}


def _counts(metrics_url: str) -> Counts:
    """Return the current counts; empty without metrics."""
    if not metrics_url:
        return {}
    try:
        with http_client(metrics_url, timeout=TIMEOUT_S) as http:
            page = http.get(metrics_url)
    except httpx.RequestError:
        return {}
    return counts_of(page.text) if page.is_success else {}


def counts_of(page: str) -> Counts:
    """Return the gauges of a page in Prometheus' text format, summed over replicas."""
    from prometheus_client.parser import text_string_to_metric_families

    columns = {gauge: column for column, gauge in GAUGES.items()}
    counts: dict[str, dict[str, Any]] = {column: defaultdict(int) for column in GAUGES}
    for family in text_string_to_metric_families(page):
        if column := columns.get(family.name):
            for sample in family.samples:
                counts[column][sample.labels["model"]] += int(sample.value)
    return counts


def print_clips(url: str, api_key: str, limit: int, *, as_json: bool = False) -> None:
    """Print the newest ``limit`` clips as a table, or as a JSON array of the server's objects."""
    with _client(url, api_key) as client:
        clips = client.clips(limit)
    if as_json:
        print(json.dumps(clips, indent=2))
        return
    print_table(("id", "status", "model", "size", "seconds", "created", "prompt"), map(_row, clips))


def download_clip(url: str, api_key: str, clip_id: str, out: Path) -> None:
    """Write the finished clip to ``out``. RefusedError if it does not exist or is not finished."""
    with _client(url, api_key) as client:
        data = client.clip_file(clip_id)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)
    console.print(str(out))


def delete_clips(url: str, api_key: str, clip_ids: Sequence[str]) -> None:
    """Delete the clips. RefusedError at the first that does not exist."""
    with _client(url, api_key) as client:
        for clip_id in clip_ids:
            client.delete_clip(clip_id)
            console.print(f"{clip_id} is deleted")


def _client(url: str, api_key: str) -> Client:
    return Client(url or the_server().url, api_key)


def _row(clip: dict[str, Any]) -> tuple[str, ...]:
    status = clip["status"]
    if status == "in_progress":
        status = f"{clip['progress']} %"
    if clip["error"]:
        status = f"failed ({clip['error']['code']})"
    prompt = printable(clip["prompt"])  # no control sequences for the terminal
    if len(prompt) > MAX_PROMPT_CHARS:
        prompt = f"{prompt[: MAX_PROMPT_CHARS - 1]}…"
    created = datetime.fromtimestamp(clip["created_at"]).strftime("%Y-%m-%d %H:%M")
    return clip["id"], status, clip["model"], clip["size"], clip["seconds"], created, prompt
