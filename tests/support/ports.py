"""Ports of a test run's own, so that several runs can share a machine."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from functools import cache

PORTS = range(20_000, 32_768)
"""Above those of Ray's workers, and below those that Linux gives to whoever asks for any."""


@cache
def own_port(use: str) -> int:
    """Returns a port of 127.0.0.1 at which nobody listened when it was first asked for, the same whenever a process
    asks for one for that ``use``."""
    while True:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
