"""``troupe door`` runs in front of a running server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deployments.cli.door import parse_address
from tests.deployments.door.support import Backend, served
from tests.deployments.support.commands import assert_one_line, command, troupe
from tests.deployments.support.live import TIMEOUT_S, wait_until


def test_it_stands_until_it_is_told_to_go(tmp_path: Path) -> None:
    with served(Backend()) as (host, own_port):
        args = ("door", "--to", f"{host}:{own_port}", "--port")
        with command(*args, "0", folder=tmp_path) as door:
            url = door.wait_for(r"(?<=Standing at )\S+")
            wait_until(lambda: httpx.get(url, timeout=TIMEOUT_S).status_code == 200, "it lets requests through")
            assert_one_line(troupe(*args, str(httpx.URL(url).port)), "is taken by another program")
            door.terminate()
            assert door.wait() == 143, door.output
            assert "Traceback" not in door.output


@pytest.mark.parametrize("address", ["", "8000", "a:b", "host", "http://a:1", "a:1/b", "a:99999"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="write it as HOST:PORT"):
        parse_address(address)


def test_addresses() -> None:
    assert parse_address("10.0.0.1:8000") == ("10.0.0.1", 8000)
    assert parse_address("[::1]:80") == ("::1", 80)
