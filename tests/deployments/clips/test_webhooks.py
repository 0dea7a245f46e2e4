"""Webhooks of clips are signed, retried until received, over restarts, once per state, and sent nowhere else."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from standardwebhooks import Webhook as Verifier

from deployments.clips import deliveries
from deployments.clips.deliveries import WebhookSender
from deployments.clips.webhooks import KeyWebhook, Webhook, WebhookSettings, is_public, signature
from deployments.database.database import Database
from deployments.database.tables import DeliveryRow
from engines.gang.errors import GangBrokenError
from tests.deployments.clips.support.runs import REQUEST, ended, running
from tests.deployments.support.fake_service import FailingService, FakeService
from tests.support.patience import PATIENCE_S

SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
LOCAL = WebhookSettings(hosts=("localhost",), networks=("127.0.0.0/8", "::1/128"))


class Receiver:
    """Answers with ``statuses`` in their order, and then always with the last."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.heard = list(statuses), list[tuple[dict[str, str], bytes]]()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) if "sig" not in line else line.split(": ", 1) for line in head[1:-2])
        body = await reader.readexactly(int(headers["content-length"]))
        self.heard.append((headers, body))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the received events, verified."""
        return [Verifier(SECRET).verify(body, headers) for headers, body in self.heard]

    async def has_heard(self, num: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < num:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(receiver: Receiver) -> AsyncIterator[Webhook]:
    server = await asyncio.start_server(receiver.connect, "127.0.0.1", 0)
    yield Webhook(url=f"http://localhost:{server.sockets[0].getsockname()[1]}/hook?a=b", secret=SECRET)
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "DELAYS_S", (0.02,) * 4)


async def test_both_ends_are_told_signed(tmp_path: Path, database_url: str) -> None:
    receiver = Receiver(204)
    place: dict[str, Any] = {"database_url": database_url, "webhooks": LOCAL}
    async with listening(receiver) as webhook:
        async with running(FakeService(), tmp_path, **place) as clips:
            completed = await clips.submit(REQUEST, "1", webhook=webhook)
            await ended(clips, completed.id)
            await receiver.has_heard(1)
        async with running(FailingService(GangBrokenError("rank 1 died")), tmp_path, **place) as clips:
            failed = await clips.submit(REQUEST, "1", webhook=webhook)
            await receiver.has_heard(2)
    first, second = receiver.events
    assert (first["type"], first["data"]["id"], first["data"]["error"]) == ("video.completed", completed.id, None)
    assert (second["type"], second["data"]["id"]) == ("video.failed", failed.id)
    assert second["data"]["error"]["code"] == "gang_broken"
    headers = receiver.heard[0][0]
    assert headers["host"] == webhook.url.split("/")[2]
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(SECRET).verify(b"{}", headers)
    assert SECRET not in repr(failed)


async def test_it_is_sent_until_received_over_restarts_with_one_id(tmp_path: Path, database_url: str) -> None:
    receiver = Receiver(500, 302, 503, 200)
    place: dict[str, Any] = {"database_url": database_url, "webhooks": LOCAL}
    async with listening(receiver) as webhook:
        async with running(FakeService(), tmp_path, **place) as clips:
            await clips.submit(REQUEST, "1", webhook=webhook)
            await receiver.has_heard(1)
        async with running(FakeService(), tmp_path, **place), running(FakeService(), tmp_path, **place):
            await receiver.has_heard(4)
            await asyncio.sleep(0.2)
    assert Counter(headers["webhook-id"] for headers, _ in receiver.heard) == {receiver.heard[0][0]["webhook-id"]: 4}


@pytest.mark.parametrize(("statuses", "num"), [((500,), 5), ((410,), 1)])
async def test_it_is_given_up(tmp_path: Path, statuses: tuple[int, ...], num: int) -> None:
    receiver = Receiver(*statuses)
    async with listening(receiver) as webhook, running(FakeService(), tmp_path, webhooks=LOCAL) as clips:
        await clips.submit(REQUEST, "1", webhook=webhook)
        await receiver.has_heard(num)
        await asyncio.sleep(0.3)
    assert len(receiver.heard) == num


async def test_what_another_replica_was_sending_when_it_died_is_sent(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(200)
    monkeypatch.setattr(deliveries, "LEASE_S", 3600.0)
    async with (
        listening(receiver) as webhook,
        running(FakeService(), tmp_path, database_url=database_url, webhooks=LOCAL) as clips,
    ):
        dead, sends = WebhookSender(clips.database, LOCAL, 1.0), WebhookSender._take

        async def nothing(sender: WebhookSender) -> None:
            return None

        monkeypatch.setattr(WebhookSender, "_take", nothing)
        record = await clips.submit(REQUEST, "1", webhook=webhook)
        await ended(clips, record.id)
        assert await sends(dead) is not None
        assert await sends(dead) is None, "it is being sent"
        async with clips.database.engine.begin() as connection:
            await connection.execute(update(DeliveryRow).values(not_before_s=time.time() - 1))  # an hour later
        monkeypatch.setattr(WebhookSender, "_take", sends)
        await receiver.has_heard(1)
    assert receiver.events[0]["data"]["id"] == record.id


async def test_an_unexpected_error_ends_neither_the_sender_nor_the_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(200)
    take, sign = WebhookSender._take, signature
    errors = {"take": [RuntimeError("take")], "sign": [RuntimeError("sign")]}

    async def take_later(sender: WebhookSender) -> DeliveryRow | None:
        if errors["take"]:
            raise errors["take"].pop()
        return await take(sender)

    def sign_later(*args: Any) -> str:
        if errors["sign"]:
            raise errors["sign"].pop()
        return sign(*args)

    monkeypatch.setattr(WebhookSender, "_take", take_later)
    monkeypatch.setattr("deployments.clips.deliveries.signature", sign_later)
    async with listening(receiver) as webhook, running(FakeService(), tmp_path, webhooks=LOCAL) as clips:
        await clips.submit(REQUEST, "1", webhook=webhook)
        await receiver.has_heard(1)
    assert errors == {"take": [], "sign": []}


async def test_names_that_are_not_found_delay_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, resolve = threading.Event(), socket.getaddrinfo

    def wait(*args: Any, **options: Any) -> Any:
        answers.wait(PATIENCE_S)
        return resolve(*args, **options)

    monkeypatch.setattr(deliveries, "ANSWER_WITHIN_S", 0.05)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    row = DeliveryRow(id="msg_1", url="https://localhost/", secret=SECRET, body="{}")
    monkeypatch.setattr(socket, "getaddrinfo", wait)
    try:
        sender = WebhookSender(Database(f"sqlite:///{tmp_path}/jobs.sqlite3"), LOCAL, 1.0)
        async with asyncio.timeout(PATIENCE_S / 2):
            assert (await sender._problem(row)).startswith("TimeoutError")
            assert await asyncio.to_thread(int, 1) == 1
    finally:
        answers.set()


async def test_private_addresses_are_refused_when_it_is_sent() -> None:
    """Names are resolved when it is sent, since they may have changed since the request."""
    anywhere = WebhookSettings(hosts=("*",))
    for url in ("https://localhost/x", "https://127.0.0.1/x", "https://[::1]/x", "https://[::ffff:10.0.0.1]/x"):
        with pytest.raises(ValueError, match=r"which is not in api\.webhooks\.networks"):
            await anywhere.resolve(url)
    for address in ("169.254.169.254", "10.1.2.3", "100.64.0.1", "0.0.0.0", "224.0.0.1"):
        with pytest.raises(ValueError, match=r"which is not in api\.webhooks\.networks"):
            await anywhere.resolve(f"https://{address}/")
    for within in ("64:ff9b::169.254.169.254", "64:ff9b:1::1", "2002:a00:1::", "::127.0.0.1", "::ffff:0:10.0.0.1"):
        with pytest.raises(ValueError, match=r"which is not in api\.webhooks\.networks"):
            await anywhere.resolve(f"https://[{within}]/")
    for public in ("64:ff9b::8.8.8.8", "2002:808:808::1", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(ip_address(public))
    parts, address = await anywhere.resolve("https://8.8.8.8:444/x")
    assert (parts.port, address) == (444, "8.8.8.8")
    with pytest.raises(ValueError, match="has the address 8"):
        await WebhookSettings(hosts=("*",), networks=("10.0.0.0/8",)).resolve("http://8.8.8.8/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://hooks.example.com/x", "it must begin with https://"),
        ("ftp://hooks.example.com/x", "it must begin with https://"),
        ("https://user:word@hooks.example.com/", "it must begin with https://"),
        ("https://hooks.example.com:x/", "it must begin with https://"),
        ("https://", "it must begin with https://"),
        (
            "https://example.com/",
            r"api\.webhooks\.hosts, which has hooks\.example\.com, \*\.example\.org",
        ),
        ("https://example.org.evil.com/", "must be in the server's api.webhooks.hosts"),
    ],
)
def test_urls_that_are_not_allowed(url: str, message: str) -> None:
    settings = WebhookSettings(hosts=("hooks.example.com", "*.example.org"))
    with pytest.raises(ValueError, match=message):
        settings.check(Webhook(url=url, secret=SECRET))
    for good in ("https://Hooks.Example.com/x", "https://a.b.example.org:8443/"):
        settings.check(Webhook(url=good, secret=SECRET))
    with pytest.raises(ValueError, match="which is empty"):
        WebhookSettings().check(Webhook(url="https://hooks.example.com", secret=SECRET))


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_c2hvcnQ=", SECRET.removeprefix("whsec_"), f"{SECRET}!", "whsec_ä"]
)
def test_secrets_that_sign_nothing(secret: str) -> None:
    with pytest.raises(ValueError, match="secret must be whsec_ and the base64 of 24 to 64 random bytes"):
        LOCAL.check(Webhook(url="https://localhost/", secret=secret))


def test_keys_have_webhooks_of_their_own() -> None:
    mine = KeyWebhook(key="0123456789", url="https://localhost/mine", secret=SECRET)
    others = KeyWebhook(key="*", url="https://localhost/others", secret=SECRET)
    settings = WebhookSettings(hosts=("localhost",), keys=(others, mine))
    assert settings.of_key("0123456789" + "0" * 54) == Webhook(url=mine.url, secret=SECRET)
    assert settings.of_key("") == Webhook(url=others.url, secret=SECRET)
    assert WebhookSettings().of_key("") is None
    with pytest.raises(ValueError, match="8 to 64 digits"):
        WebhookSettings(hosts=("localhost",), keys=(KeyWebhook(key="me", url=mine.url, secret=SECRET),))
    with pytest.raises(ValueError, match=r"webhooks\.networks holds '10\.0\.0\.1/8'"):
        WebhookSettings(networks=("10.0.0.1/8",))
    assert json.dumps(SECRET)[1:-1] not in repr(settings)
