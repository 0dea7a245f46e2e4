"""A server behind a door, and the door."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from deployments.door.door import Door, listen
from deployments.door.door_settings import DoorSettings
from deployments.door.haproxy import PictureQueue
from tests.support.patience import PATIENCE_S

BACKLOG = 2048
"""Backlog of uvicorn, and so of Ray's proxy. If it is full, the kernel drops connections, which takes seconds."""
SETTINGS = DoorSettings(max_head_bytes=4096, max_connections=200, head_timeout_s=PATIENCE_S)


@dataclass
class Backend:
    """A server behind the door that records its requests; ``live`` is the status of its ``/live``."""

    live: int = 200
    release: threading.Event = field(default_factory=threading.Event)
    seen: list[str] = field(default_factory=list)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                backend.seen.append(self.path)
                if self.path == "/slow":
                    backend.release.wait(PATIENCE_S)
                own = json.dumps([[name.lower(), value] for name, value in self.headers.items()]).encode()
                self.send_response({"/broken": 500, "/live": backend.live}.get(self.path, 200))
                self.send_header("Content-Length", str(len(own)))
                self.end_headers()
                self.wfile.write(own)

            def do_POST(self) -> None:
                self.do_GET()

            do_DELETE = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@contextmanager
def served(backend: Backend, port: int = 0) -> Iterator[tuple[str, int]]:
    with handled(backend.handler(), port) as address:
        try:
            yield address
        finally:
            backend.release.set()


class Server(ThreadingHTTPServer):
    request_queue_size = BACKLOG


@contextmanager
def handled(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the address of a server in a thread, which ends at once on request."""
    with Server(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield "127.0.0.1", int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def doored(
    address: tuple[str, int],
    settings: DoorSettings = SETTINGS,
    trusted_proxies: tuple[str, ...] = (),
    queue: PictureQueue | None = None,
    allowed_origins: tuple[str, ...] = (),
    start_s: float = 0.0,
) -> Iterator[tuple[Door, httpx.Client]]:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        Door(listener, address, settings, trusted_proxies, queue, allowed_origins, start_s) as door,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield door, client


def address_of(client: httpx.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port or 0


def assert_error(answer: httpx.Response, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
