"""Ports for one test run, so that several runs can share a machine."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from functools import cache

PORTS = range(20_000, 32_768)
"""Ports above those of Ray's workers, and below those that Linux gives out."""


@cache
def own_port(use: str) -> int:
    """Return a port of 127.0.0.1 that was free at the first call. It is the same for each ``use`` in a process."""
    while True:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
