"""Pictures are fetched from trusted origins alone, over real HTTP, and within the limits of all pictures."""

from __future__ import annotations

import gzip
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deployments.requests.pictures import fetch
from deployments.requests.pictures.fetch import origin_of
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sources import Sources
from deployments.requests.pictures.unpack import unpack
from deployments.requests.request_errors import RequestError
from tests.deployments.support.files import file_of, noise
from tests.support.patience import PATIENCE_S

FILE = file_of(noise(16, 24))
BOMB = gzip.compress(bytes(32 << 20))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout: the server is in this process, which may wait long for a core."""
    monkeypatch.setattr(fetch, "FETCHED_WITHIN_S", PATIENCE_S)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/picture.png")
            self.end_headers()
            return
        if self.path == "/bomb.png":
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(BOMB)
            return
        self.send_response(200 if self.path == "/picture.png" else 404)
        self.end_headers()
        self.wfile.write(FILE if self.path == "/picture.png" else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_trusted_origin_is_asked(origin: str) -> None:
    sources = Sources(param="image", pictures=(f"{origin}/picture.png",))
    (fetched,) = unpack(sources, PictureLimits(picture_origins=(origin,))).pictures
    (sent,) = unpack(Sources(param="image", pictures=(FILE,)), PictureLimits()).pictures
    assert fetched == sent


@pytest.mark.parametrize(
    ("path", "message"),
    [("/nothing.png", "answered 404"), ("/elsewhere", "answered 302")],
)
def test_what_is_not_there_is_said(origin: str, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        unpack(Sources(param="image", pictures=(origin + path,)), PictureLimits(picture_origins=(origin,)))


def test_the_limit_of_bytes_holds(origin: str) -> None:
    limits = PictureLimits(picture_origins=(origin,), max_picture_bytes=len(FILE) - 1)
    with pytest.raises(RequestError, match="more than") as caught:
        unpack(Sources(param="image", pictures=(f"{origin}/picture.png",)), limits)
    assert caught.value.code == "picture_too_large"


def test_what_is_compressed_takes_no_memory(origin: str) -> None:
    limits = PictureLimits(picture_origins=(origin,), max_picture_bytes=1 << 20)
    tracemalloc.start()
    with pytest.raises(RequestError, match="compressed with 'gzip'"):
        unpack(Sources(param="image", pictures=(f"{origin}/bomb.png",)), limits)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_a_server_that_is_gone_is_said() -> None:
    limits = PictureLimits(picture_origins=("http://127.0.0.1:9",))
    with pytest.raises(RequestError, match=r"could not be fetched \(ConnectError\)"):
        unpack(Sources(param="image", pictures=("http://127.0.0.1:9/a.png",)), limits)


@pytest.mark.parametrize("path", ["/\x01", "/" + "a" * 70_000], ids=["unprintable", "long"])
def test_an_address_that_is_none_is_said(path: str) -> None:
    limits = PictureLimits(picture_origins=("http://127.0.0.1:9",))
    with pytest.raises(RequestError, match=r"could not be fetched \(InvalidURL\)"):
        unpack(Sources(param="image", pictures=(f"http://127.0.0.1:9{path}",)), limits)


@pytest.mark.parametrize(
    "url", ["https://evil.example/a.png", "http://images.example.com/a.png", "https://images.example.com:8443/a.png"]
)
def test_other_origins_are_not_asked(url: str) -> None:
    limits = PictureLimits(picture_origins=("https://images.example.com",))
    with pytest.raises(RequestError, match=r"are fetched from https://images\.example\.com alone"):
        unpack(Sources(param="image", pictures=(url,)), limits)


def test_names_before_an_at_sign_are_not_the_host() -> None:
    assert origin_of("https://images.example.com@evil.example/a.png") == "https://evil.example"
    assert origin_of("HTTPS://Images.Example.com/a.png") == "https://images.example.com"
    assert origin_of("https://[::1") == ""


def test_origins_are_checked_when_they_are_configured() -> None:
    with pytest.raises(ValueError, match=r"picture_origins holds 'images\.example\.com'"):
        PictureLimits(picture_origins=("images.example.com",))
