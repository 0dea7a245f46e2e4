"""Allowed host names of a server, and the URLs made of them.

With DNS rebinding, an attacker's page has a name that points to this machine, and sends that name as ``Host``. It
cannot send an address, nor a name that it does not own.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from starlette.datastructures import URL, Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.errors import ApiError
from deployments.http.settings import ApiSettings
from deployments.requests.request_errors import shown

LOCAL_NAMES = ("localhost", "*.localhost")
"""RFC 6761, section 6.3: these never leave the machine."""


class HostCheck:
    """Refuses requests with 403 whose ``Host`` is none of the server's names. Without a ``Host`` no browser asks."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self.app = app
        self.names = known_names(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or is_known(host, self.names):
            await self.app(scope, receive, send)
            return
        message = f"Host is {shown(host)}, which is no name of this server; to allow it, add it to api.allowed_hosts"
        await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)


def known_names(settings: ApiSettings) -> tuple[str, ...]:
    """Return the allowed host names of requests: a name, ``*.domain`` for its subdomains, or ``*`` for any.

    Where keys are asked for, a page without one gets nothing: any name is allowed unless some are configured.
    """
    if not settings.allowed_hosts and settings.keys:
        return ("*",)
    public = urlsplit(settings.public_url).hostname
    names = (*LOCAL_NAMES, *settings.allowed_hosts, *settings.own_names, *([public] if public else []))
    return tuple(name.lower() for name in names)


def is_known(host: str, names: Collection[str]) -> bool:
    """Return whether the header ``host``, with or without a port, is an IP address or one of ``names``."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if set(host) & set("/\\?#@"):
        return False
    return is_address(name) or any(matches(name.rstrip("."), pattern) for pattern in names)


def matches(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def base_url(connection: HTTPConnection, settings: ApiSettings) -> str:
    """Return the server's URL as the client sees it, without a slash at the end.

    It is ``public_url`` if that is set, else the name that the client used, which ``HostCheck`` has checked. With keys
    and without configured names, any name that came with a valid key is allowed. ``X-Forwarded`` headers count if they
    come from one of ``trusted_proxies``.
    """
    if settings.public_url:
        return settings.public_url.rstrip("/")
    url = URL(scope=connection.scope)
    scheme, place = url.scheme, url.netloc
    if is_from_proxy(connection, settings):
        scheme, place = forwarded(connection, "proto") or scheme, forwarded(connection, "host") or place
    elif "x-forwarded-proto" in connection.headers:
        scheme = "http"  # uvicorn took over what it said, if it came from this machine
    return f"{scheme}://{place}{connection.scope.get('root_path', '').rstrip('/')}"


def forwarded(connection: HTTPConnection, what: str) -> str:
    """Return the first proxy's ``X-Forwarded-…`` value; empty if it is absent or invalid."""
    value = connection.headers.get(f"x-forwarded-{what}", "").split(",")[0].strip()
    if what == "proto":
        return value if value in ("http", "https") else ""
    return value if place_of(f"//{value}") == value else ""


def place_of(url: str) -> str:
    """Return host and port of ``url``; empty if absent or invalid."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def is_from_proxy(connection: HTTPConnection, settings: ApiSettings) -> bool:
    peer = peer_of(connection)
    networks = [ip_network(proxy, strict=False) for proxy in settings.trusted_proxies]
    return is_address(peer) and any(ip_address(peer) in network for network in networks)


def peer_of(connection: HTTPConnection) -> str:
    """Return the peer address of the connection; empty if unknown.

    For a neighbour on 127.0.0.1 uvicorn puts in its place, with port 0, what that said with ``X-Forwarded-For``.
    """
    if connection.client is None:
        return ""
    return connection.client.host if connection.client.port else "127.0.0.1"
