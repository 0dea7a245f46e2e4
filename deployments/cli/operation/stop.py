"""``troupe stop``: SIGTERM to a server of this machine, and what came of it."""

from __future__ import annotations

import os
import signal
import time

from deployments.cli.operation.servers import file_of, servers, the_server
from deployments.cli.progress import console

POLL_S = 0.1


def stop(port: int | None, timeout_s: float) -> None:
    """End the server on ``port``, or the only one, and wait until it is gone.

    ValueError if there is none or the choice is not clear, RuntimeError if it runs still after ``timeout_s``.
    """
    server, begun_s = the_server(port), time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    while server in servers():
        if time.monotonic() - begun_s > timeout_s:
            raise RuntimeError(
                f"{server.url} (process {server.pid}) has SIGTERM and runs still after {timeout_s:g} s: "
                f"what is under way may not be done; `kill -9 {server.pid}` ends it at once"
            )
        time.sleep(POLL_S)
    file_of(server.url).unlink(missing_ok=True)
    took_s = time.monotonic() - begun_s
    console.print(f"{server.url} (process {server.pid}) ended after {took_s:.1f} s", soft_wrap=True)
