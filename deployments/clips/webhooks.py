"""Webhooks: clients hear of the end of a clip by a signed request (https://www.standardwebhooks.com)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import re
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from deployments.usage.api_keys import check_key_start, entry_of

PREFIX = "whsec_"
KEY_BYTES = range(24, 65)
"""Allowed lengths of secrets."""
HOST = re.compile(r"\*|(\*\.)?[\w.:-]+")
GLOBAL_UNICAST = ip_network("2000::/3")
"""All public IPv6 addresses (RFC 4291, section 2.4); Python takes some others for public as well."""
NAT64 = ip_network("64:ff9b::/96")
"""IPv4 addresses behind a translator (RFC 6052), which may reach private ones."""
LOOKUPS = ThreadPoolExecutor(4, "webhook-lookup")
"""Threads that wait for name servers. The event loop's own threads serve files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Webhook:
    """Receiver of messages about the end of a clip."""

    url: str
    """Address of the messages."""
    secret: str = field(repr=False)
    """Signs them (Standard Webhooks): ``whsec_`` and base64."""


@dataclass(frozen=True, kw_only=True)
class KeyWebhook:
    """The webhook of all clips that an API key asks for, unless a request names its own."""

    key: str
    """The beginning of the key's SHA-256, or "*" for every key and for none."""
    url: str
    """Address of the messages."""
    secret: str = field(repr=False)
    """Signs them (Standard Webhooks): ``whsec_`` and base64."""


@dataclass(frozen=True, kw_only=True)
class WebhookSettings:
    """Where messages may go. ValueError for what cannot work. Without ``hosts`` there are no webhooks."""

    hosts: tuple[str, ...] = ()
    """Names that may be called; ``*.example.com`` has all below it."""
    networks: tuple[str, ...] = ()
    """Private networks that their addresses may be in; these may be called by http, too."""
    keys: tuple[KeyWebhook, ...] = ()
    """Webhooks of API keys, for requests without one of their own."""

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise ValueError(f"webhooks.hosts holds {host!r}; it must be a name, such as *.example.com")
        for network in self.networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ValueError(
                    f"webhooks.networks holds {network!r}; it must be such as 10.0.0.0/8: {error}"
                ) from None
        for one in self.keys:
            check_key_start("key of webhooks.keys", one.key)
            self.check(Webhook(url=one.url, secret=one.secret))

    def check(self, webhook: Webhook) -> None:
        """Raise ValueError unless messages may go to ``webhook``."""
        self._split(webhook.url)
        signing_key(webhook.secret)

    def of_key(self, key_hash: str) -> Webhook | None:
        """Return the webhook of a key; None if it has none."""
        entry = entry_of(self.keys, key_hash)
        return None if entry is None else Webhook(url=entry.url, secret=entry.secret)

    def _split(self, url: str) -> SplitResult:
        schemes = ("https", "http") if self.networks else ("https",)
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            parts, host = urlsplit(""), ""
        if parts.scheme not in schemes or not host or parts.username is not None or not url.isascii():
            raise ValueError(f"url is {url[:200]!r}; it must begin with {' or '.join(schemes)}:// and a host")
        if not any(fnmatchcase(host.lower().rstrip("."), pattern.lower()) for pattern in self.hosts):
            allowed = f"which has {', '.join(self.hosts)}" if self.hosts else "which is empty"
            raise ValueError(f"url is {url[:200]!r}; its host must be in the server's api.webhooks.hosts, {allowed}")
        return parts

    async def resolve(self, url: str) -> tuple[SplitResult, str]:
        """Return the parts of ``url`` and the address to connect to. ValueError if one of its addresses is private."""
        parts = self._split(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        look_up = partial(socket.getaddrinfo, parts.hostname, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(LOOKUPS, look_up)
        addresses = [ip_address(str(one[4][0]).partition("%")[0]) for one in found]
        for address in addresses:
            is_own = any(address in ip_network(network) for network in self.networks)
            if not is_own and (parts.scheme == "http" or not is_public(address)):
                raise ValueError(f"{parts.hostname} has the address {address}, which is not in api.webhooks.networks")
        return parts, str(addresses[0])


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether ``address`` is a public one, or stands for a public IPv4 address."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    if inner := embedded_address(address):
        return is_public(inner)
    return address in GLOBAL_UNICAST and address.is_global


def embedded_address(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that ``address`` stands for; None of any other."""
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def signing_key(secret: str) -> bytes:
    """Return the key in a secret. ValueError if it is none."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or len(key) not in KEY_BYTES:
        raise ValueError(f"secret must be {PREFIX} and the base64 of 24 to 64 random bytes")
    return key


def signature(secret: str, delivery_id: str, timestamp: int, body: str) -> str:
    """Return the header ``webhook-signature``: HMAC-SHA256 over id, timestamp and body."""
    digest = hmac.new(signing_key(secret), f"{delivery_id}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def webhook_from_json(text: str | None) -> Webhook | None:
    return None if text is None else Webhook(**json.loads(text))


def webhook_json(webhook: Webhook | None) -> str | None:
    return None if webhook is None else json.dumps(asdict(webhook))


def delivery(webhook: Webhook, event: str, data: Mapping[str, object]) -> dict[str, object]:
    """Return the columns of the message that ``event`` has happened to the object ``data``."""
    name = hashlib.sha256(f"{data['id']} {event}".encode()).hexdigest()[:32]
    now_s = time.time()
    body = {"id": f"evt_{name}", "object": "event", "type": event, "created_at": int(now_s), "data": data}
    columns = {"id": f"msg_{name}", "url": webhook.url, "secret": webhook.secret, "body": json.dumps(body)}
    return {**columns, "not_before_s": now_s, "attempts": 0}
