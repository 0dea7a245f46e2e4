"""``troupe door``: the door alone, in front of an application on a cluster."""

from __future__ import annotations

import signal
from urllib.parse import urlsplit

from deployments.cli.progress import console
from deployments.cli.serving import load_config
from deployments.door.door import Door, listen
from deployments.door.haproxy import PictureQueue
from deployments.names import url_at


def run_door(to: str, host: str, port: int, config: str) -> None:
    """Listen on ``host`` and ``port`` until Ctrl-C or SIGTERM, with the door and proxy settings of ``config``.

    Without the application's own ``config`` its number of places is unknown, and pictures are not queued.
    ValueError if an address is invalid or taken; RuntimeError without HAProxy.
    """
    backend = parse_address(to)
    app = load_config(config or "laptop").app
    queue = PictureQueue.of(app) if config else None
    listener = listen(host, port)
    own_url = url_at(host, listener.getsockname()[1])  # the port may have been 0
    with Door(listener, backend, app.door, app.api.trusted_proxies, queue, app.api.allowed_origins):
        console.print(f"Standing at {own_url} in front of {to}. Ctrl-C ends it.")
        signal.pause()


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. ValueError for anything else."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path:
        raise ValueError(f"--to is {address}: write it as HOST:PORT, such as 127.0.0.1:8000")
    return host, port
