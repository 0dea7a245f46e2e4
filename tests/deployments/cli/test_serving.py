"""The application joins a running cluster, and listens on the right port."""

from __future__ import annotations

import socket

import pytest
from ray import serve
from ray.serve.config import HTTPOptions

from deployments.cli.serving import load_config, reserved_port, running
from deployments.door.door import listen


def test_serve_that_runs_at_another_address_is_said_at_once(ray_cluster: None) -> None:
    with reserved_port("127.0.0.1") as port:
        serve.start(http_options=HTTPOptions(port=port))
        try:
            with (
                pytest.raises(ValueError, match="Ray Serve is already running"),
                running(load_config("laptop").with_http(port=0)),
            ):
                pass
            assert serve.status().proxies, "it is left as it was"
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]


def test_a_held_port_is_given_to_who_shares_it_alone() -> None:
    """Ray's proxies share the port; a program that asks for any free port does not get it."""
    with reserved_port("127.0.0.1") as port:
        with pytest.raises(ValueError, match="is taken by another program"):
            listen("127.0.0.1", port)
        with socket.socket() as proxy:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                proxy.setsockopt(socket.SOL_SOCKET, option, 1)
            proxy.bind(("127.0.0.1", port))
            proxy.listen()
            for _ in range(20):  # all of them reach the proxy
                socket.create_connection(("127.0.0.1", port)).close()
                proxy.accept()[0].close()
    with listen("127.0.0.1", port):
        pass
