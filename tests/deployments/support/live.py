"""The whole application under test: its configs, its clients' view, and its processes and logs."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import ray
from numpy.typing import NDArray
from PIL import Image

from deployments.cli.serving import parse_config, running
from deployments.config import ServeConfig
from tests.engines.gang.support.helpers import num_placement_groups
from tests.support.patience import PATIENCE_S
from tests.support.processes import cmdline

T = TypeVar("T")
TIMEOUT_S = 2 * PATIENCE_S
"""An answer may wait for 59 others, for a gang's rebuild, or for its first node: up to 50 s on busy cores."""
POLL_S, LATEST_POLL_S = 0.05, 0.5
LOOKS_TO_PAUSE = 4
"""Ratio of the pause before the next look to the duration of the last one."""
IMAGES = "/v1/images/generations"
PROMPT = "a red circle"
SMALL = {"size": "64x64", "num_inference_steps": 8}
"""A picture's default fields here: the shipped models' own defaults take five times as long."""


def config_of(models: Mapping[str, Path], *, api: Mapping[str, Any] | None = None, **denoiser: Any) -> ServeConfig:
    """Return ``models`` (name to folder), each with two CPU ranks; ``denoiser`` goes to all of their gangs.

    No warm worker replaces a gang that breaks: these applications end before one could.
    """
    gang = {"num_ranks": 2, "cpus_per_rank": 0.1, "strategy": "ulysses", "engine": "torch"}
    gang |= {"ping_deadline_s": 30.0, **denoiser}  # ranks may wait for a core
    args = {
        "models": [{"name": name, "path": str(path), "denoiser": gang} for name, path in models.items()],
        "api": dict(api or {}),
        "metrics": {"port": None},
    }
    application = {"name": "troupe", "route_prefix": "/", "import_path": "deployments.app:build_app", "args": args}
    return parse_config({"http_options": {"port": 0}, "applications": [application]})


@contextmanager
def live(config: ServeConfig) -> Iterator[str]:
    """Yield the URL of the running application, and check that nothing of it is left in the session's cluster."""
    before = num_placement_groups()
    with running(config) as url:
        yield url
    wait_until(lambda: not footprint() and num_placement_groups() <= before, "the application is gone")


# The clients' view.


@asynccontextmanager
async def stream_of(
    client: httpx.AsyncClient, body: Mapping[str, Any]
) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
    """Yield the events of a streamed picture from its first step on, with every step. Leaving the block hangs up."""
    wanted = {"prompt": PROMPT, **SMALL, "stream": True, "stream_progress": True, **body}
    async with client.stream("POST", IMAGES, json=wanted, timeout=TIMEOUT_S) as response:
        if response.status_code != httpx.codes.OK:
            raise AssertionError(f"{response.status_code}: {await response.aread()!r}")
        yield _events(response)


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if event.get("type") != "troupe.queued":
                yield event


async def streamed(client: httpx.AsyncClient, **body: Any) -> bytes:
    """Return the finished picture of a stream."""
    async with stream_of(client, body) as events:
        async for event in events:
            last = event
    return finished(last)


def finished(event: Mapping[str, Any]) -> bytes:
    assert event["type"] == "image_generation.completed", event
    return base64.b64decode(event["b64_json"])


def picture(url: str, **body: Any) -> bytes:
    """Return the finished picture of a request that is not streamed."""
    response = httpx.post(f"{url}{IMAGES}", json={"prompt": PROMPT, **SMALL, **body}, timeout=TIMEOUT_S)
    assert response.status_code == httpx.codes.OK, response.text
    return base64.b64decode(response.json()["data"][0]["b64_json"])


def pixels_of(data: bytes) -> NDArray[Any]:
    """Return uint8, shape (height, width, 3)."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@contextmanager
def asked_for(url: str, pictures: Sequence[bytes], *, num_clients: int = 1, **body: Any) -> Iterator[None]:
    """Let ``num_clients`` request ``pictures`` in turn, by seed, during the block. Each answer must be the same again.

    They stop after the block, once their answers have come.
    """
    enough = threading.Event()

    def ask(first: int) -> None:
        for i in itertools.count(first):
            seed = i % len(pictures)
            assert picture(url, seed=seed, **body) == pictures[seed]
            if enough.is_set():
                return

    with ThreadPoolExecutor(num_clients) as threads:
        clients = [threads.submit(ask, first) for first in range(num_clients)]
        try:
            yield
        finally:
            enough.set()
    for client in clients:
        client.result()


# The machine's view.


def footprint() -> Counter[str]:
    """Count the application's processes by kind, and under ``ports`` the sockets on which its gangs listen."""
    found: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            title = title_of(process)
            if title.startswith("ray::Rank"):
                found["Rank"] += 1
                found["ports"] += sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
            elif title.startswith("ray::ServeReplica:troupe:"):
                found[title.split(":")[4].split(".")[0]] += 1
        except psutil.Error:
            continue
    return found


def replica_pid(deployment: str) -> int:
    """Return the pid of the newest replica of ``deployment``."""
    title = f"ray::ServeReplica:troupe:{deployment}"
    pids: list[int] = [one.pid for one in psutil.Process().children(recursive=True) if title_of(one).startswith(title)]
    return max(pids)


def title_of(process: psutil.Process) -> str:
    """Return the title of a process; empty for one that has ended, or is about to."""
    return (cmdline(process) or [""])[0]


def log_lines(message: str, logs: Path | None = None) -> list[dict[str, Any]]:
    """Return the structured log lines of all processes of the session that begin with ``message``, by time.

    ``log_pid`` is the process that wrote the line. ``logs`` is the session's folder of logs; by default that of the
    cluster that this process is connected to.
    """
    logs = logs or Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs"  # type: ignore[no-untyped-call]
    found = []
    for name, text in log_texts(logs).items():
        for line in text.splitlines():
            record = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if record.get("message", "").startswith(message):
                found.append(record | {"log_pid": int(name.rsplit("-", 1)[1])})
    return sorted(found, key=lambda record: str(record["time"]))


def log_texts(logs: Path) -> dict[str, str]:
    """Return the text of each log of a session by file name, which holds the process id.

    Ray moves the files of ended processes to ``old`` when there are many; in this order none is missed.
    """
    texts = {}
    for folder in (logs, logs / "old"):
        for file in folder.glob("worker-*.err"):
            with contextlib.suppress(FileNotFoundError):
                texts[file.stem] = file.read_text(errors="replace")
    return texts


def rank_pids(model: str) -> list[int]:
    """Return the pids of the gang that serves ``model`` now, by rank."""
    pids: list[int] = [record["pids"] for record in log_lines("gang is ready") if record["model"] == model][-1]
    return pids


def wait_until(holds: Callable[[], T], what: str, *, at_once: bool = False, patience_s: float = PATIENCE_S) -> T:
    """Return the result of ``holds()`` once it is true. Raise AssertionError after ``patience_s``.

    Slow checks run less often, so that the awaited work has the cores. With ``at_once`` they do not, for conditions
    that hold for a moment only.
    """
    end_s = time.monotonic() + patience_s
    while True:
        begin_s = time.monotonic()
        if found := holds():
            return found
        now_s = time.monotonic()
        assert now_s < end_s, f"not within {patience_s:g} s: {what}"
        time.sleep(POLL_S if at_once else max(POLL_S, min(LATEST_POLL_S, LOOKS_TO_PAUSE * (now_s - begin_s))))
