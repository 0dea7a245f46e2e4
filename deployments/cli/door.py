"""``troupe door``: the door alone, in front of an application that runs on a cluster."""

from __future__ import annotations

import signal
from urllib.parse import urlsplit

from deployments.cli.progress import console
from deployments.cli.serving import load_config
from deployments.door.door import Door, listen
from deployments.door.haproxy import Lane
from deployments.names import url_at


def stand(to: str, host: str, port: int, config: str) -> None:
    """Listen on ``host`` and ``port`` until Ctrl-C or SIGTERM, with what ``config`` says of the door and of proxies.

    Only with the application's own ``config`` it knows how many pictures that takes: with none, all may ask for one.
    ValueError for an address that is none, or is taken; RuntimeError without HAProxy.
    """
    backend = parse_address(to)
    app = load_config(config or "laptop").app
    lane = Lane.of(app) if config else None
    listener = listen(host, port)
    own_url = url_at(host, listener.getsockname()[1])  # of port 0 the one that was free
    with Door(listener, backend, app.door, app.api.trusted_proxies, lane, app.api.allowed_origins):
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
