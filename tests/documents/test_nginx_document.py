"""nginx runs the site of docs/operate/nginx.md in front of the door and a small application."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvicorn
import yaml
from cryptography.x509.oid import ExtendedKeyUsageOID
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from deployments.cli.serving import behind_door, parse_config
from deployments.config import AppConfig
from deployments.door.door import Door, listen
from deployments.http.hosts import base_url, is_known, known_names
from deployments.http.settings import ApiSettings
from tests.support.certificates import Authority
from tests.support.fenced import blocks
from tests.support.patience import PATIENCE_S
from tests.support.ports import own_port

BLOCKS = {block.language: block.text for block in blocks("docs/operate/nginx.md")}
NAME = "troupe.example.com"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
NUM_EVENTS = 3
STUCK_S = 30.0
"""After this an event that has not arrived counts as delayed."""
OWN_PLACES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Folders that nginx makes for temporary files; the built-in ones belong to root."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"),
]


@dataclass
class Application:
    """Streams an event whenever the client has the last one, counts uploads, and returns its own names."""

    settings: ApiSettings
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    left: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._read(receive)
        if scope["path"] == "/events":
            await self._stream(send)
            return
        if scope["path"] == "/wait":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun\n", "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        connection = HTTPConnection(scope)
        host = connection.headers.get("host", "")
        names = [host, is_known(host, known_names(self.settings)), base_url(connection, self.settings)]
        content = str(len(body)) if scope["path"] == "/upload" else json.dumps(names)
        await PlainTextResponse(content)(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body)

    async def _stream(self, send: Send) -> None:
        """Send events without X-Accel-Buffering, so that the site alone must prevent buffering."""
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(NUM_EVENTS):
            event = f"data: {number}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.to_thread(self.taken.acquire, timeout=STUCK_S)
        await send({"type": "http.response.body", "body": b""})


@contextmanager
def in_thread(application: Application) -> Iterator[tuple[str, int]]:
    """Yield the address of the application under uvicorn, as in Ray Serve."""
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield "127.0.0.1", int(listener.getsockname()[1])
    finally:
        application.taken.release(NUM_EVENTS)
        server.should_exit = True
        thread.join()


@contextmanager
def nginx(folder: Path, door_port: int, authority: Authority) -> Iterator[tuple[int, int]]:
    """Yield the ports of the documented site (plain, TLS), with this machine's ports and certificate."""
    issued = authority.issue(NAME, usage=ExtendedKeyUsageOID.SERVER_AUTH)
    plain, tls = own_port("nginx plain"), own_port("nginx tls")
    site = BLOCKS["nginx"]
    for documented, here in {
        "listen 80;": f"listen 127.0.0.1:{plain};",
        "listen 443 ssl;": f"listen 127.0.0.1:{tls} ssl;",
        "http://127.0.0.1:8000;": f"http://127.0.0.1:{door_port};",
        f"/etc/letsencrypt/live/{NAME}/fullchain.pem": str(issued.certificate),
        f"/etc/letsencrypt/live/{NAME}/privkey.pem": str(issued.key),
    }.items():
        assert site.count(documented) == 1, documented
        site = site.replace(documented, here)
    places = "\n".join(f"{name}_temp_path {folder / name};" for name in OWN_PLACES)
    head = f"daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1; events {{}}"
    if os.geteuid() == 0:
        head = f"user root;\n{head}"  # the workers write below ``folder`` as this user
    whole = folder / "nginx.conf"
    whole.write_text(f"{head}\nhttp {{ access_log off;\n{places}\n{site}}}\n")
    command = [str(NGINX), "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(whole)]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    process = subprocess.Popen(command)
    try:
        yield plain, tls
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def documented_settings(folder: Path) -> tuple[AppConfig, ApiSettings]:
    """Return the document's configuration, and the settings of the API behind the door."""
    app = parse_config(yaml.safe_load(BLOCKS["yaml"])).app
    inner = behind_door(app).api
    settings = ApiSettings(data_dir=folder, trusted_proxies=inner.trusted_proxies, allowed_hosts=inner.allowed_hosts)
    return app, settings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Application, httpx.Client, int]]:
    """Yield the application, a client that trusts the site's certificate, and the port of plain HTTP."""
    folder = tmp_path_factory.mktemp("nginx")
    app, settings = documented_settings(folder)
    application, authority = Application(settings), Authority(folder)
    listener = listen("127.0.0.1", 0)
    with (
        in_thread(application) as address,
        Door(listener, address, app.door, app.api.trusted_proxies),
        nginx(folder, int(listener.getsockname()[1]), authority) as (plain, tls),
    ):
        trust = ssl.create_default_context(cadata=authority.anchor)
        trust.check_hostname = False  # the certificate's name is not 127.0.0.1
        transport = httpx.HTTPTransport(verify=trust, retries=8)
        url = f"https://127.0.0.1:{tls}"
        with httpx.Client(base_url=url, headers={"Host": NAME}, transport=transport, timeout=PATIENCE_S) as client:
            until_answered(client)
            yield application, client, plain


def until_answered(client: httpx.Client) -> None:
    """Wait until the door has found the application (503 until then)."""
    for _ in range(1000):
        if client.get("/names").status_code == httpx.codes.OK:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the application was not reached through nginx")


def test_events_arrive_one_at_a_time(site: tuple[Application, httpx.Client, int]) -> None:
    """The next event is written only when the client has the last: a proxy that buffers them gets stuck."""
    application, client, _ = site
    events = []
    with client.stream("GET", "/events", timeout=STUCK_S / 2) as response:
        for line in response.iter_lines():
            if line:
                events.append(line)
                application.taken.release()
    assert events == [f"data: {number}" for number in range(NUM_EVENTS)]


def test_a_client_that_leaves_ends_its_request(site: tuple[Application, httpx.Client, int]) -> None:
    application, client, _ = site
    with client.stream("POST", "/wait", json={}) as response:
        assert next(response.iter_lines()) == "begun"
    assert application.left.wait(STUCK_S)


def test_uploads_of_the_allowed_size_pass(site: tuple[Application, httpx.Client, int]) -> None:
    application, client, _ = site
    num_bytes = application.settings.max_upload_bytes
    for num_sent in (num_bytes, num_bytes + 1):  # Troupe refuses the second one, with its own error
        assert client.post("/upload", content=bytes(num_sent)).text == str(num_sent)
    assert client.post("/upload", content=bytes(num_bytes + (2 << 20))).status_code == 413


def test_the_server_finds_its_public_name(site: tuple[Application, httpx.Client, int]) -> None:
    _, client, _ = site
    lies = {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "http"}
    assert client.get("/names", headers=lies).json() == [NAME, True, f"https://{NAME}"]


def test_plain_http_leads_to_tls(site: tuple[Application, httpx.Client, int]) -> None:
    _, _, plain = site
    answer = httpx.get(f"http://127.0.0.1:{plain}/names?a=b", headers={"Host": NAME})
    assert (answer.status_code, answer.headers["location"]) == (301, f"https://{NAME}/names?a=b")
