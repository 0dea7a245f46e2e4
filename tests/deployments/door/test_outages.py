"""The application behind the real HAProxy ends, during a request or before it, and comes back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest

from deployments.door.haproxy import BACK, MAX_RETRY_S, PictureQueue
from deployments.door.outages import Outages
from deployments.names import LIVE
from tests.deployments.door.support import Backend, assert_error, doored, handled, served
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

IMAGES, CLIPS = "/v1/images/generations", "/v1/videos"
QUEUE = PictureQueue(num_places=1, body_deadline_s=PATIENCE_S)


class Dying(BaseHTTPRequestHandler):
    """Dies under posted requests as often as ``deaths`` says: without an answer, or with one of Ray's own proxy."""

    protocol_version = "HTTP/1.1"
    deaths: tuple[int, ...] = ()
    keys: tuple[str | None, ...] = ()
    """The ``Idempotency-Key`` of each request."""

    def do_GET(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        number = len(Dying.keys)
        Dying.keys += (self.headers["Idempotency-Key"],)
        self.answer(Dying.deaths[number] if number < len(Dying.deaths) else 200)

    def answer(self, status: int) -> None:
        if not status:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=[None, QUEUE], ids=["without a queue", "queue"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    Dying.keys = ()
    with handled(Dying) as address, doored(address, queue=request.param) as (_, client):
        yield client


@pytest.mark.parametrize("path", [IMAGES, CLIPS])
@pytest.mark.parametrize("deaths", [(0, 404), (500, 0)])
def test_a_request_without_an_answer_is_sent_again(client: httpx.Client, path: str, deaths: tuple[int, ...]) -> None:
    Dying.deaths = deaths
    assert client.post(path, content=b"{}").status_code == 200
    assert len(Dying.keys) == 3
    assert len({*Dying.keys}) == 1
    assert (Dying.keys[0] is None) is (path == IMAGES), "a clip is made once, whatever the first attempt did"


def test_a_request_that_ends_each_process_is_given_up(client: httpx.Client) -> None:
    Dying.deaths = (0,) * 9
    answer = client.post(IMAGES, content=b"{}")
    assert_error(answer, 502, "server_lost")
    assert int(answer.headers["retry-after"]) > 0
    assert len(Dying.keys) == 3


def test_others_are_sent_once(client: httpx.Client) -> None:
    """They may have had an effect, or exceed the buffer."""
    Dying.deaths = (0, 0, 0)
    for path, num_bytes in (("/v1/files", 2), (IMAGES, 100_000), (CLIPS, 100_000)):
        assert_error(client.post(path, content=b"a" * num_bytes), 502, "server_lost")
    assert Dying.keys == (None, None, None)


def test_the_clients_own_key_stays(client: httpx.Client) -> None:
    Dying.deaths = (0,)
    assert client.post(CLIPS, content=b"{}", headers={"Idempotency-Key": "mine"}).status_code == 200
    assert Dying.keys == ("mine", "mine")


class HangingOnce(Backend):
    """Never answers its first health check, whose timeout (``patient_checks``) is above the door's longest wait."""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        backend: Backend = self
        answering: Any = super().handler()

        class Handler(answering):  # type: ignore[misc]
            def do_GET(self) -> None:
                if self.path == LIVE and LIVE not in backend.seen:
                    backend.seen.append(LIVE)
                    backend.release.wait(PATIENCE_S)
                super().do_GET()

        return Handler


@pytest.mark.parametrize("path", [IMAGES, CLIPS])
# Slow: before the wait had its own checks, one run in thirty took 30 s, for an unknown reason.
@pytest.mark.parametrize("next_one", [HangingOnce, pytest.param(Backend, marks=pytest.mark.slow)])
def test_requests_wait_for_an_application_that_was_there(backend: Backend, path: str, next_one: type[Backend]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with doored(address, queue=QUEUE) as (_, client), ThreadPoolExecutor() as pool:
        assert_error(client.post(path, content=b"{}"), 503, "server_unavailable")
        with served(backend, address[1]):
            wait_until(lambda: client.get("/").status_code == 200, "the application is there")
        wait_until(lambda: client.get("/").status_code == 503, "it is gone")
        waiting = pool.submit(client.post, path, content=b"{}")
        with served(next_one(), address[1]):
            assert waiting.result().status_code == 200


def test_an_outage_is_expected_to_take_as_long_as_the_last_one() -> None:
    now_s = 1000.0
    outages = Outages(60.0, lambda: now_s, lambda: now_s)
    assert outages.back_s == 1060
    now_s += 90.0
    assert outages.note(is_there=True)
    assert outages.back_s == 0
    now_s += 500.0
    assert not outages.note(is_there=True)
    assert outages.note(is_there=False)
    assert outages.back_s == 1590 + 90
    assert not outages.note(is_there=False)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_does_not_change_how_long_an_outage_took(jump_s: float) -> None:
    date_s, now_s = 1000.0, 0.0
    outages = Outages(60.0, lambda: date_s, lambda: now_s)
    date_s, now_s = 1090.0 + jump_s, 90.0
    assert outages.note(is_there=True)
    assert outages.note(is_there=False)
    assert outages.back_s == date_s + 90


def test_nobody_is_told_to_come_before_the_application(backend: Backend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with doored(address, start_s=1000.0) as (door, client):

        def told_s(path: str = "/") -> int:
            answer = client.get(path)
            return int(answer.headers["retry-after"]) if answer.status_code == 503 else 0

        assert 900 < told_s() <= 1001, "whole seconds, not before it"
        with served(backend, address[1]):
            wait_until(lambda: door._outages.back_s == 0, "the door has seen it")
            assert client.get("/").status_code == 200
            door._outages._expected_s = 500.0
        wait_until(lambda: 400 < told_s("/health") <= 501, "the duration of the last outage")
        for back_s in (1, 2**31):
            assert door._ask(f"set map {door._wiring.back} {BACK} {back_s}", PATIENCE_S)
            assert told_s() == MAX_RETRY_S, "the clock was set"
