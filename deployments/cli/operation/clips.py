"""``troupe clips``: clips of a running server, listed, fetched and deleted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from deployments.cli.client import Client
from deployments.cli.operation.servers import the_server
from deployments.cli.progress import console
from deployments.requests.errors import printable

MAX_PROMPT_CHARS = 40


def print_clips(url: str, api_key: str, limit: int, *, as_json: bool = False) -> None:
    """Print the newest ``limit`` clips as a table, or as the server's own objects in a JSON array."""
    with _client(url, api_key) as client:
        clips = client.clips(limit)
    if as_json:
        print(json.dumps(clips, indent=2))
        return
    table = Table(
        Column("id", no_wrap=True, overflow="ignore", min_width=max([2, *(len(c["id"]) for c in clips)])),
        "model",
        "status",
        "size",
        "seconds",
        "created",
        "prompt",
    )
    for clip in clips:
        table.add_row(*_row(clip))
    console.print(table)


def download_clip(url: str, api_key: str, clip_id: str, out: Path) -> None:
    """Write the finished clip to ``out``. RefusedError if it is not there, or not finished."""
    with _client(url, api_key) as client:
        data = client.clip_file(clip_id)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)
    console.print(str(out), soft_wrap=True)


def delete_clips(url: str, api_key: str, clip_ids: Sequence[str]) -> None:
    """Delete each. RefusedError at the first that is not there."""
    with _client(url, api_key) as client:
        for clip_id in clip_ids:
            client.delete_clip(clip_id)
            console.print(f"{clip_id} is deleted", soft_wrap=True)


def _client(url: str, api_key: str) -> Client:
    return Client(url or the_server().url, api_key)


def _row(clip: dict[str, Any]) -> tuple[str, ...]:
    status = clip["status"]
    if status == "in_progress":
        status = f"{clip['progress']} %"
    if clip["error"]:
        status = f"failed ({clip['error']['code']})"
    prompt = printable(clip["prompt"])  # whatever a client sends is no command to the terminal
    if len(prompt) > MAX_PROMPT_CHARS:
        prompt = f"{prompt[: MAX_PROMPT_CHARS - 1]}…"
    created = datetime.fromtimestamp(clip["created_at"]).strftime("%Y-%m-%d %H:%M:%S")
    return clip["id"], clip["model"], status, clip["size"], clip["seconds"], created, prompt
