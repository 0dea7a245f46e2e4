"""Some hosts are reached through a proxy, and others directly."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import httpx
import pytest

from deployments.cli.local import exceptions_for, http_client, is_own
from deployments.settings import process_environment
from tests.deployments.door.support import Backend, served

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(Backend()) as (_, port):
        yield port


BAD = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "no_proxy": "localhost,[::1]",
    "https_proxy": "ftp://secret:word@127.0.0.1:9",
    "SSL_CERT_FILE": "/nowhere/certificates",
}


@pytest.mark.parametrize("name", BAD)
def test_this_machine_is_asked_directly(port: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, BAD[name])
    for host in ("127.0.0.1", "localhost"):
        with http_client(f"http://{host}:{port}") as client:
            assert client.get(f"http://{host}:{port}/live").status_code == 200


def test_others_are_asked_through_the_proxy(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
    with http_client("http://troupe.invalid") as client:
        assert client.get("http://troupe.invalid/live").status_code == 200


@pytest.mark.parametrize("name", [name for name in BAD if name != "HTTP_PROXY"])
def test_a_variable_that_cannot_be_used_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, BAD[name])
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError, match=f"^http://other:80 cannot be reached: the variable {name} cannot be used"
    ) as it:
        http_client("http://other:80")
    assert "word" not in str(it.value)
    assert process_environment()[name] == BAD[name]


def test_own_addresses() -> None:
    own = ("localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", socket.gethostname())
    assert [host for host in own if not is_own(host)] == []
    assert [
        host for host in ("", "192.0.2.1", "2001:db8::1", "example.org", "localhost.example.org") if is_own(host)
    ] == []


@pytest.mark.parametrize("given", ["", "example.org", "example.org, .corp"])
@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_processes_reach_each_other_without_a_proxy(given: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own library reads the variables: earlier exceptions stay."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(name, given)
    for variable, value in exceptions_for(["10.0.0.7"], process_environment()).items():
        monkeypatch.setenv(variable, value)
    proxies = getproxies_environment()
    excepted = ["localhost", "127.0.0.1", "10.0.0.7", *(["example.org"] if given else [])]
    assert [host for host in excepted if not proxy_bypass_environment(host, proxies)] == []
    assert not proxy_bypass_environment("troupe.invalid", proxies)
    assert "10.0.0.7" in process_environment()["no_grpc_proxy"]
    httpx.Client().close()


def test_an_environment_without_a_proxy_stays_as_it_is() -> None:
    assert exceptions_for(["10.0.0.7"], {"no_proxy": "[::1]"}) == {}


def test_all_stays_all() -> None:
    """Python's library does not read a list that contains it as all."""
    assert "no_proxy" not in exceptions_for(["10.0.0.7"], {"HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": "*"})
