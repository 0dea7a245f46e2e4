"""This machine reaches listeners at the right address."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from deployments.door.door import listen
from deployments.names import url_at
from tests.support.patience import PATIENCE_S


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://localhost:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("", "http://127.0.0.1:"),
        ("::", "http://[::1]:"),
        ("::1", "http://[::1]:"),
    ],
)
def test_who_listens_there_answers(host: str, expected: str) -> None:
    server = HTTPServer(("", 0), Answer, bind_and_activate=False)
    server.socket.close()
    with listen(host, 0) as server.socket:
        port = server.socket.getsockname()[1]
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert url_at(host, port) == f"{expected}{port}"
        assert httpx.get(url_at(host, port), timeout=PATIENCE_S).status_code == 204
        thread.join()
