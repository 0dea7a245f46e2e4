"""The configuration limits the connections of the real HAProxy."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket

import httpx
import pytest

from deployments.door import haproxy
from deployments.door.door import Door, listen
from deployments.door.door_settings import DoorSettings
from tests.deployments.door.support import Backend, address_of, assert_error, doored, served
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S


def test_too_many_connections_are_told(backend: Backend) -> None:
    settings = DoorSettings(max_connections=40, head_timeout_s=PATIENCE_S)
    with served(backend) as address, doored(address, settings) as (_, client):
        where = address_of(client)
        with contextlib.ExitStack() as stack:
            for _ in range(38):
                stack.enter_context(socket.create_connection(where))
            wait_until(lambda: client.get("/").status_code == 503, "the door is full")
            assert_error(client.get("/"), 503, "server_full")
            assert client.get("/health").status_code == 200
        wait_until(lambda: client.get("/").status_code == 200, "there is room again")


def test_few_connections_on_a_listener_whose_descriptor_is_a_high_number(backend: Backend) -> None:
    with listen("127.0.0.1", 0) as first:
        listener = socket.socket(fileno=fcntl.fcntl(first, fcntl.F_DUPFD, 700))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with served(backend) as address, Door(listener, address, DoorSettings(max_connections=40)):
        wait_until(lambda: httpx.get(url, timeout=PATIENCE_S).status_code == 200, "the door is there")


def test_the_limit_is_what_files_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    assert haproxy.max_connections(DoorSettings()) == 240, "each takes two descriptors in each of two frontends"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    assert haproxy.max_connections(DoorSettings()) == DoorSettings().max_connections


def test_one_connection_at_a_time_is_enough_for_one_client(backend: Backend) -> None:
    with served(backend) as address, doored(address, DoorSettings(max_connections=1)) as (_, client):
        wait_until(lambda: client.get("/").status_code == 200, "the door lets one through")
