"""A chat endpoint of OpenAI's form, over real HTTP, that records its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.patience import PATIENCE_S

HANGS = 0
"""Status of an endpoint that never answers."""
HANGS_UP = -1
"""Status of an endpoint that closes the connection."""


def completion(content: object, finish_reason: str | None = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()


@dataclass
class ChatEndpoint:
    """Answers with ``status`` and ``content``. ``bodies`` are the requests' bodies, ``keys`` their Authorization
    headers.
    """

    url: str = ""
    status: int = 200
    content: bytes = completion("a red circle in the evening sun")
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Paths of clients that closed the connection while it hung."""

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.bodies.append(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
        self.keys.append(request.headers["Authorization"])
        self.paths.append(request.path)
        request.close_connection = True
        if self.status == HANGS:
            request.connection.settimeout(2 * PATIENCE_S)
            if request.connection.recv(1) == b"":
                self.left.append(request.path)
        if self.status <= 0:
            return
        request.send_response(self.status)
        request.send_header("Content-Length", str(len(self.content)))
        request.send_header("Location", f"{self.url}/elsewhere")
        request.end_headers()
        request.wfile.write(self.content)


@contextmanager
def chat_endpoint() -> Iterator[ChatEndpoint]:
    endpoint = ChatEndpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            endpoint.handle(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
