"""Proxies that the environment names: addresses of this machine are asked directly, whatever it says."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from deployments.settings import process_environment, variables_set

SCHEMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
READ_BY_CLIENTS = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def http_client(url: str, **options: Any) -> httpx.Client:
    """Return a client for requests to ``url``. It uses the environment's proxies unless that is this machine.

    ValueError names the variable of the environment that it cannot use.
    """
    if not uses_proxies(url):
        return httpx.Client(trust_env=False, **options)
    try:
        return httpx.Client(**options)
    except Exception as error:
        if problem := client_problem():
            raise ValueError(f"{url} cannot be asked: {problem}") from error
        raise


def uses_proxies(url: str) -> bool:
    """Return whether requests to ``url`` may use the environment's proxies: httpx's ``trust_env``."""
    return not is_own(httpx.URL(url).host)


def is_own(host: str) -> bool:
    """Return whether ``host``, a name or an address, is this machine. Asks no name server."""
    if host == "localhost" or host.endswith(".localhost") or host == socket.gethostname():
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))  # the kernel knows its own addresses
        except OSError:
            return False
    return True


def client_problem() -> str | None:
    """Return which variable no HTTP client can be made with, and why; None if there is none."""
    named = [name for name in process_environment() if name.lower() in READ_BY_CLIENTS]
    for name in named:
        with variables_set(dict.fromkeys(set(named) - {name})):
            try:
                httpx.Client().close()
            except Exception as error:
                return f"the variable {name} cannot be used: {error}"  # its value may hold a password
    return None


def exceptions_for(hosts: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to set beside ``variables`` so that processes reach ``hosts``, and this one, without a proxy.

    gRPC reads ``no_grpc_proxy`` before ``no_proxy``, in lower case alone (its documentation of environment variables).
    """
    lower = {name.lower(): value for name, value in sorted(variables.items()) if value}  # lower case comes last
    if not any(name in lower for name in SCHEMES):
        return {}
    excepted = lower.get("no_proxy", "")
    values = {"no_grpc_proxy": lower.get("no_grpc_proxy", excepted)}
    if "*" not in excepted:  # with others beside it, some libraries do not read it as all
        values["no_proxy"] = excepted
    return {name: ",".join(dict.fromkeys([*_entries(value), *OWN_NAMES, *hosts])) for name, value in values.items()}


def _entries(value: str) -> list[str]:
    return [entry for part in value.split(",") if (entry := part.strip())]
