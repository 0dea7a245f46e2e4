"""The real HAProxy in front of an application with few places refuses some requests itself, and others never."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from deployments.config import AppConfig
from deployments.door import haproxy
from deployments.door.haproxy import SPARE, PictureQueue
from deployments.names import FULL_HEADER
from tests.deployments.door.support import doored, handled
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
NUM_PLACES = 3
GOOD, BAD, LARGE = b'{"prompt": "a"}', b"{", b" " * 100_000


@dataclass
class House:
    """An application with ``NUM_PLACES``: ``seen`` has the statuses of requested pictures."""

    doors_open: threading.Event = field(default_factory=threading.Event)
    """Set when requests for pictures may be handled."""
    made: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each finished picture."""
    seen: list[int] = field(default_factory=list)
    num_inside: int = 0
    num_held: int = 0
    most_inside: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def picture(self, body: bytes, is_gone: Callable[[], bool]) -> int:
        with self.lock:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        self.doors_open.wait(PATIENCE_S)
        status = self._picture(body, is_gone)
        with self.lock:
            self.num_inside -= 1
            self.seen.append(status)
        return status

    def _picture(self, body: bytes, is_gone: Callable[[], bool]) -> int:
        if body == BAD:
            return 400
        with self.lock:
            if self.num_held >= NUM_PLACES:
                return 429
            self.num_held += 1
        while not (finished := self.made.acquire(timeout=0.01)) and not is_gone():
            pass
        with self.lock:
            self.num_held -= 1
        return 200 if finished else 499

    def handler(self) -> type[BaseHTTPRequestHandler]:
        house = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(200)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(house.picture(body, self._is_gone) if self.path == IMAGES else 200)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "2")
                if status == 429:
                    self.send_header(FULL_HEADER, "7")
                    self.send_header("X-By", "house")
                self.end_headers()
                self.wfile.write(b"{}")

            def _is_gone(self) -> bool:
                return bool(select.select([self.connection], [], [], 0)[0])

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(haproxy, "REFUSAL_MS", 3_600_000)  # longer than any test
    monkeypatch.setattr(haproxy, "QUEUE_S", 3600)
    yield (house := House())
    house.doors_open.set()


@pytest.fixture
def client(house: House) -> Iterator[httpx.Client]:
    own_queue = PictureQueue(num_places=NUM_PLACES, body_deadline_s=PATIENCE_S)
    with handled(house.handler()) as address, doored(address, queue=own_queue) as (_, client):
        wait_until(lambda: client.get("/").status_code == 200, "the application is there")
        yield client
        house.made.release(1000)


@pytest.fixture
def ask(client: httpx.Client) -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Request a picture in a thread, over a connection of its own. The door may close one with an unread body when it
    is used again, and httpx does not repeat posts."""
    alone = {"Connection": "close"}
    with ThreadPoolExecutor(100) as pool:
        yield lambda body=GOOD: pool.submit(client.post, IMAGES, content=body, headers=alone)


Ask = Callable[..., Future[httpx.Response]]


def fill(house: House, ask: Ask) -> list[Future[httpx.Response]]:
    """Take all places, and let the application refuse one more request."""
    house.doors_open.set()
    holders = [ask() for _ in range(NUM_PLACES)]
    wait_until(lambda: house.num_held == NUM_PLACES, "all places are taken")
    refused = ask().result()
    assert (refused.status_code, refused.headers["x-by"]) == (429, "house")
    assert FULL_HEADER not in refused.headers
    return holders


def test_after_the_application_refused_one_the_door_does(house: House, ask: Ask) -> None:
    holders = fill(house, ask)
    house.seen.clear()
    answers = [ask(body).result() for body in (GOOD, LARGE) * 20]
    assert house.seen == [], "the application was not asked"
    for answer in answers:
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert answer.headers["x-request-id"].startswith("req_")
    waits = {int(answer.headers["retry-after"]) for answer in answers}
    assert waits <= set(range(1, 8)), "until all that is under way will be finished"
    assert len(waits) > 1, "not all come back at once"
    house.made.release(NUM_PLACES)
    assert [holder.result().status_code for holder in holders] == [200] * NUM_PLACES


@pytest.mark.parametrize("how", ["finished", "hung up"])
def test_a_place_that_becomes_free_is_given_away(house: House, ask: Ask, client: httpx.Client, how: str) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as raw:
        raw.sendall(f"POST {IMAGES} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD)
        house.doors_open.set()
        wait_until(lambda: house.num_held == 1, "one has a place")
        holders = [ask() for _ in range(NUM_PLACES - 1)]
        wait_until(lambda: house.num_held == NUM_PLACES, "all places are taken")
        assert ask().result().headers.get("x-by") == "house"
        assert ask().result().headers.get("x-by") is None
        if how == "hung up":
            raw.close()
        else:
            house.made.release()
        wait_until(lambda: house.num_held == NUM_PLACES - 1, "a place is free")
        asked = [ask()]

        def is_taken() -> bool:
            if asked[-1].done():  # refused: the door learns of the free place a moment after the house
                asked.append(ask())
            return house.num_held == NUM_PLACES

        wait_until(is_taken, "it is taken again")
        holders.append(asked[-1])
        house.made.release(NUM_PLACES)
        assert {holder.result().status_code for holder in holders} == {200}


def test_a_burst_waits_for_the_word_and_goes(house: House, ask: Ask) -> None:
    answers = [ask() for _ in range(80)]
    wait_until(lambda: house.num_inside == NUM_PLACES + SPARE, "the application is full")
    house.doors_open.set()
    wait_until(lambda: sum(answer.done() for answer in answers) == 80 - NUM_PLACES, "all others are refused")
    assert house.most_inside == NUM_PLACES + SPARE
    assert len(house.seen) < 80 - NUM_PLACES, "the door has refused the rest"
    house.made.release(NUM_PLACES)
    statuses = sorted(answer.result().status_code for answer in answers)
    assert statuses == [200] * NUM_PLACES + [429] * (80 - NUM_PLACES)


def test_what_is_wrong_takes_no_place_from_what_is_right(house: House, ask: Ask) -> None:
    wrong = [ask(BAD) for _ in range(60)]
    wait_until(lambda: house.num_inside == NUM_PLACES + SPARE, "the application is busy with what is wrong")
    right = [ask() for _ in range(NUM_PLACES)]
    house.doors_open.set()
    house.made.release(NUM_PLACES)
    assert {answer.result().status_code for answer in wrong} == {400}
    assert {answer.result().status_code for answer in right} == {200}


def test_everything_else_goes_on(house: House, ask: Ask, client: httpx.Client) -> None:
    fill(house, ask)
    assert ask().result().headers.get("x-by") is None
    for path in ("/health", "/v1/videos/video_1/events", "/v1/images/generations"):
        assert client.get(path).status_code == 200, path
    for body in (GOOD, LARGE):
        assert client.post("/v1/videos", content=body).status_code == 200
    house.made.release(NUM_PLACES)


def test_bodies_that_do_not_come_take_no_place(house: House, ask: Ask, client: httpx.Client) -> None:
    house.doors_open.set()
    house.made.release(1)
    with ExitStack() as stack:
        for _ in range(4 * (NUM_PLACES + SPARE)):
            slow = stack.enter_context(socket.create_connection((client.base_url.host, client.base_url.port or 0)))
            slow.sendall(f"POST {IMAGES} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert ask().result().status_code == 200


def test_a_body_that_does_not_come_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    with doored(address, queue=PictureQueue(num_places=1, body_deadline_s=0.2)) as (_, client):
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as slow:
            slow.sendall(f"POST {IMAGES} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{{".encode())
            head, _, body = b"".join(iter(lambda: slow.recv(65536), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "body_timeout"
        answer = client.post(IMAGES, content=GOOD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_unavailable")


def test_places_are_those_of_the_application() -> None:
    def queue_of(**api: object) -> PictureQueue:
        models = [{"name": "flux-shapes"}, {"name": "wan-shapes"}, {"name": "elsewhere", "path": "/on/another/machine"}]
        return PictureQueue.of(AppConfig.model_validate({"models": models, "api": api}))

    own = AppConfig.model_validate({"models": [{"name": "m"}]}).models[0].max_open_pictures
    assert queue_of().num_places == 2 * own, "a model of clips draws no pictures"
    assert queue_of(max_open_pictures=7, num_replicas=3).num_places == 3 * 2 * 7
