"""The address of a server that makes no pictures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.benchmarks.load.support.server import Server


@pytest.fixture
def url() -> Iterator[str]:
    Server.seen.clear()
    Server.all_have_come.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
