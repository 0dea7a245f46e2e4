"""A server of Google's storage API for tests (gcp-storage-emulator), and the environment with its address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import httpx

PACKAGES = ("gcsfs", "gcp_storage_emulator")


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def environment(endpoint: str) -> Mapping[str, str]:
    """Return the variables with the server's address. It has no API for the type of a bucket."""
    return {"STORAGE_EMULATOR_HOST": endpoint, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a server on a free port of this machine."""
    from gcp_storage_emulator.server import create_server

    server: Any = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    host, port = server._api._httpd.server_address[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(endpoint: str, name: str) -> None:
    httpx.post(f"{endpoint}/storage/v1/b", params={"project": "tests"}, json={"name": name}).raise_for_status()
