"""The real HAProxy handles HTTP's edges: clients that close early, stray bodies, pages of other origins."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from deployments.door import door as doors
from deployments.door import haproxy, lua_actions
from deployments.door.door_settings import DoorSettings
from deployments.door.haproxy import PictureQueue
from deployments.door.outages import server_state
from deployments.names import FULL_HEADER
from tests.deployments.door.support import SETTINGS, Backend, address_of, assert_error, doored, handled, served
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_small_body_that_means_nothing_passes(client: httpx.Client, method: str) -> None:
    """Some clients send {} with every request."""
    assert client.request(method, "/", content=b"{}").status_code == 200


def test_a_connection_that_is_opened_early_is_closed_without_a_word(backend: Backend) -> None:
    settings = DoorSettings(head_timeout_s=0.2)
    with (
        served(backend) as address,
        doored(address, settings) as (_, client),
        socket.create_connection(address_of(client)) as connection,
    ):
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1000) == b""


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_who_closes_its_side_after_the_request_is_answered(client: httpx.Client, method: str) -> None:
    """RFC 9112, section 9.6: the client reads until the server closes."""
    with socket.create_connection(address_of(client)) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(f"{method} / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


QUEUE = PictureQueue(num_places=1, body_deadline_s=PATIENCE_S)
CLIPS = "/v1/videos"


def posted(path: str, version: str, body: bytes = b"{}") -> bytes:
    return f"POST {path} {version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("path", "version", "queue"),
    [
        (CLIPS, "HTTP/1.1", QUEUE),
        (CLIPS, "HTTP/1.0", QUEUE),
        (IMAGES, "HTTP/1.0", QUEUE),
        (IMAGES, "HTTP/1.0", None),
        (IMAGES, "HTTP/1.1", QUEUE),
        (IMAGES, "HTTP/1.1", None),
        ("/v1/videos/sync", "HTTP/1.1", QUEUE),
    ],
)
def test_who_closes_its_side_after_its_body_is_answered(
    backend: Backend, path: str, version: str, queue: PictureQueue | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9112, section 9.6: the client reads until the server closes. The backend answers once the close is seen."""
    monkeypatch.setattr(lua_actions, "HALF_CLOSE_MS", 1000 * PATIENCE_S)
    with (
        served(backend) as address,
        doored(address, queue=queue) as (_, client),
        socket.create_connection(address_of(client)) as connection,
    ):
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # the close comes with the request
        connection.sendall(posted(path, f"{version}\r\nConnection: close"))
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"]")
        assert path in backend.seen


class Stream(BaseHTTPRequestHandler):
    """Sends events until the reader is gone."""

    protocol_version = "HTTP/1.1"
    left = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"1\r\n:\r\n")
                time.sleep(0.01)
        self.left.set()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize(("path", "queue"), [(CLIPS, None), (IMAGES, QUEUE)])
def test_who_goes_in_the_middle_of_a_stream_ends_it(path: str, queue: PictureQueue | None, version: str) -> None:
    Stream.left.clear()
    with handled(Stream) as address, doored(address, queue=queue) as (_, client):
        with socket.create_connection(address_of(client)) as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(posted(path, version))
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert Stream.left.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("version", "trusted"), [("HTTP/1.1", ()), ("HTTP/1.1", ("127.0.0.0/8",)), ("HTTP/1.0", ("127.0.0.0/8",))]
)
def test_who_closes_its_side_later_is_gone(backend: Backend, version: str, trusted: tuple[str, ...]) -> None:
    """This includes a proxy that closes at once: it cannot report its client's departure otherwise."""
    with (
        served(backend) as address,
        doored(address, trusted_proxies=trusted) as (_, client),
        socket.create_connection(address_of(client)) as connection,
    ):
        connection.settimeout(PATIENCE_S)
        connection.sendall(posted("/slow", version))
        if not trusted:
            wait_until(lambda: "/slow" in backend.seen, "the request is passed on")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/%2d/routes", "/-%2Froutes", "/-/"])
def test_pages_of_ray_stay_outside(client: httpx.Client, backend: Backend, path: str) -> None:
    assert_error(client.get(path), 404, "not_found")
    assert path not in backend.seen


PAGE = "http://ui.example:3000"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.parametrize(("allowed", "told"), [((PAGE, "null"), PAGE), (("*",), "*")])
def test_allowed_pages_read_what_the_door_says(backend: Backend, allowed: tuple[str, ...], told: str) -> None:
    """The names are those of the Fetch Standard, section 3.2."""
    backend.live = 503
    with served(backend) as address, doored(address, allowed_origins=allowed) as (door, client):
        # No request here: one answered before the first check would let later ones wait.
        state = "show servers state application"
        wait_until(lambda: server_state(door._ask(state)) is False, "the door knows that the server is gone")
        preflight = client.options(IMAGES, headers=ASKS)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, told)
        assert "POST" in preflight.headers["access-control-allow-methods"].split(",")
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        refused = client.post(IMAGES, content=b"{}", headers={"Origin": PAGE})
        assert_error(refused, 503, "server_unavailable")
        assert refused.headers["access-control-allow-origin"] == told
        assert "Retry-After" in refused.headers["access-control-expose-headers"].split(",")
        too_large = client.get("/", headers={"Origin": PAGE, "X-Long": "a" * SETTINGS.max_head_bytes})
        assert (too_large.status_code, too_large.headers["access-control-allow-origin"]) == (431, told)
        assert "access-control-allow-origin" not in client.get("/").headers


class Full(BaseHTTPRequestHandler):
    """Has no place for a picture."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(429)

    def answer(self, status: int) -> None:
        self.send_response(status)
        for name, value in (("Content-Length", "0"), ("X-By", "application"), (FULL_HEADER, "5")):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_allowed_pages_read_that_all_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "REFUSAL_MS", round(1000 * PATIENCE_S))
    with handled(Full) as address, doored(address, queue=QUEUE, allowed_origins=(PAGE,)) as (_, client):
        headers = {"Origin": PAGE}
        assert client.post(IMAGES, content=b"{}", headers=headers).headers["x-by"] == "application"
        refused = client.post(IMAGES, content=b"{}", headers=headers)
        assert_error(refused, 429, "queue_full")
        assert refused.headers["access-control-allow-origin"] == PAGE
        assert "Retry-After" in refused.headers["access-control-expose-headers"].split(",")


def test_allowed_pages_read_that_nothing_came_in_time(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "render", lambda *parts: haproxy.render(*parts).replace("server 24h", "server 200ms"))
    with served(backend) as address, doored(address, allowed_origins=(PAGE,)) as (_, client):
        late = client.get("/slow", headers={"Origin": PAGE})
        assert_error(late, 504, "server_timeout")
        assert late.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origin", ["http://other.example", "http://UI.example:3000", f"{PAGE}, http://other.example"])
def test_other_pages_read_nothing(backend: Backend, origin: str) -> None:
    backend.live = 503
    with served(backend) as address, doored(address, allowed_origins=(PAGE,)) as (_, client):
        wait_until(lambda: client.get("/").status_code == 503, "the door knows that the server is gone")
        for answer in (
            client.options(IMAGES, headers=ASKS | {"Origin": origin}),
            client.get("/", headers={"Origin": origin}),
        ):
            assert_error(answer, 503, "server_unavailable")
            assert "access-control-allow-origin" not in answer.headers
