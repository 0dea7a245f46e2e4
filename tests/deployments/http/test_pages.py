"""Web pages may make a browser send some requests here, by some host names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.http.hosts import is_known
from deployments.http.openapi_text import HEADERS
from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
EVIL = "https://evil.example"
VIDEO = f"/v1/videos/video_{'0' * 32}"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://[nonsense"},
        {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
async def test_a_page_of_others_changes_nothing(
    client: httpx.AsyncClient, service: FakeService, headers: dict[str, str]
) -> None:
    body = {"prompt": "a"}
    form = {"prompt": (None, "a")}
    for answer in (
        await client.post(IMAGES, json=body, headers=headers),
        await client.post("/v1/videos", json=body, headers=headers),
        await client.post("/v1/videos", files=form, headers=headers),
        await client.delete(VIDEO, headers=headers),
    ):
        error = error_of(answer, 403)
        assert error["code"] == "origin_not_allowed"
        assert "api.allowed_origins" in error["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert service.performed == []
    assert (await client.get("/v1/videos", headers=headers)).json()["data"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
async def test_programs_and_the_servers_own_page_may(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await client.post(IMAGES, json={"prompt": "a"}, headers=headers)).status_code == 200


async def test_the_own_page_behind_a_proxy_may(service: FakeService, tmp_path: Path) -> None:
    headers = {"Origin": "https://pictures.example"}
    body = {"prompt": "a"}
    async with client_of(build(service, tmp_path, public_url="https://pictures.example/api")) as client:
        assert (await client.post(IMAGES, json=body, headers=headers)).status_code == 200
    headers["X-Forwarded-Host"] = "pictures.example"
    async with client_of(build(service, tmp_path)) as client:
        assert (await client.post(IMAGES, json=body, headers=headers)).status_code == 403
    async with client_of(build(service, tmp_path, trusted_proxies=("127.0.0.1",))) as client:
        assert (await client.post(IMAGES, json=body, headers=headers)).status_code == 200


async def test_pages_of_allowed_origins_may_give_orders_and_read_answers(service: FakeService, tmp_path: Path) -> None:
    own = "https://studio.example"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with client_of(build(service, tmp_path, allowed_origins=(own,))) as client:
        allowed = await client.options(IMAGES, headers={"Origin": own} | ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == own
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        made = await client.post(IMAGES, json={"prompt": "a"}, headers={"Origin": own, "Sec-Fetch-Site": "cross-site"})
        assert (made.status_code, made.headers["access-control-allow-origin"]) == (200, own)
        readable = made.headers["access-control-expose-headers"].split(", ")
        assert {*HEADERS} - {*readable} == set(), "all that the document has"
        wrong = await client.post(IMAGES, json={}, headers={"Origin": own})
        assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, own)
        assert error_of(await client.options(IMAGES, headers={"Origin": EVIL} | ask), 403)
        assert error_of(await client.post(IMAGES, json={"prompt": "a"}, headers={"Origin": EVIL}), 403)
        other = await client.options(IMAGES, headers={"Origin": own} | ask | {"Access-Control-Request-Method": "PATCH"})
        error = error_of(other, 405)
        assert error["message"] == "Pages may not send 'PATCH' here; allowed: GET, HEAD, POST, DELETE"
        assert other.headers["access-control-allow-origin"] == own
        private = {"Origin": own, "Access-Control-Request-Private-Network": "true"} | ask
        assert (await client.options(IMAGES, headers=private)).headers["access-control-allow-private-network"] == "true"
        named = await client.post(IMAGES, json={}, headers={"Origin": own, "Host": "evil.example"})
        assert (named.status_code, named.headers["access-control-allow-origin"]) == (403, own), "it may read why"
    async with client_of(build(service, tmp_path, allowed_origins=("*",))) as client:
        made = await client.post(IMAGES, json={"prompt": "a"}, headers={"Origin": EVIL})
        assert (made.status_code, made.headers["access-control-allow-origin"]) == (200, "*")


async def test_a_name_that_was_made_to_point_here_is_refused(service: FakeService, tmp_path: Path) -> None:
    headers = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"}
    async with client_of(build(service, tmp_path)) as client:
        for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", IMAGES), ("GET", "/health")):
            error = error_of(await client.request(method, path, headers=headers, json={"prompt": "a"}), 403)
            assert error["code"] == "host_not_allowed"
            assert "api.allowed_hosts" in error["message"]
    assert service.performed == []


HOSTS = [
    ("localhost", {}, True),
    ("LocalHost:8000", {}, True),
    ("app.localhost", {}, True),
    ("127.0.0.1:8000", {}, True),
    ("10.1.2.3:8000", {}, True),  # Kubernetes' health check of a pod
    ("[::1]:8000", {}, True),
    ("gpu1", {"own_names": ("GPU1",)}, True),
    ("gpu1.evil.example", {"own_names": ("gpu1",)}, False),
    ("pictures.example", {"public_url": "https://pictures.example/api"}, True),
    ("pictures.example", {"allowed_hosts": ("Pictures.example",)}, True),
    ("a.pictures.example", {"allowed_hosts": ("pictures.example",)}, False),
    ("a.pictures.example", {"allowed_hosts": ("*.pictures.example",)}, True),
    ("evilpictures.example", {"allowed_hosts": ("*.pictures.example",)}, False),
    ("localhost", {"allowed_hosts": ("pictures.example",)}, True),
    ("whatever", {"allowed_hosts": ("*",)}, True),
    ("whatever", {"api_keys": ("alpha",)}, True),  # without the key, a page gets nothing
    ("whatever", {"api_keys": ("alpha",), "allowed_hosts": ("pictures.example",)}, False),
    ("localhost.evil.example", {}, False),
    ("127.0.0.1.evil.example", {}, False),
    ("evil.example@localhost", {}, False),
    ("localhost/evil.example", {}, False),
    ("[nonsense", {}, False),
    ("", {}, False),
]


@pytest.mark.parametrize(("host", "settings", "is_allowed"), HOSTS)
async def test_names_of_the_server(
    service: FakeService, tmp_path: Path, host: str, settings: dict[str, Any], is_allowed: bool
) -> None:
    async with client_of(build(service, tmp_path, **settings)) as client:
        answer = await client.get("/health", headers={"Host": host})
        assert answer.status_code == (200 if is_allowed else 403)


async def test_a_program_of_old_that_names_no_host_is_answered(service: FakeService, tmp_path: Path) -> None:
    """Load balancers request the health in HTTP/1.0; browsers always name a host."""
    assert not is_known("", ("localhost",))
    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await build(service, tmp_path)(scope, receive, send)
    assert messages[0]["status"] == 200


async def url_of(client: httpx.AsyncClient, **headers: str) -> str:
    answer = await client.post(IMAGES, json={"prompt": "a", "response_format": "url"}, headers=headers)
    return str(answer.json()["data"][0]["url"]).rsplit("/v1/files/", 1)[0]


FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "pictures.example"}


async def test_what_a_client_says_of_a_proxy_makes_no_urls(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path)) as client:
        assert await url_of(client) == "http://localhost"
        assert await url_of(client, **FORWARDED) == "http://localhost"
    async with client_of(build(service, tmp_path, trusted_proxies=("10.0.0.0/8", "192.0.2.1"))) as client:
        assert await url_of(client, **FORWARDED) == "http://localhost"


async def test_what_a_trusted_proxy_says_makes_urls(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, trusted_proxies=("127.0.0.0/8",))) as client:
        assert await url_of(client, **FORWARDED) == "https://pictures.example"
        assert await url_of(client) == "http://localhost"
        nonsense = {"X-Forwarded-Proto": "gopher", "X-Forwarded-Host": "a/b"}
        assert await url_of(client, **nonsense) == "http://localhost"


@pytest.mark.parametrize(
    ("proxies", "url"), [((), "http://127.0.0.1"), (("127.0.0.1",), "https://pictures.example")], ids=["no", "yes"]
)
async def test_a_proxy_on_the_same_machine_is_trusted_like_others(
    service: FakeService, tmp_path: Path, proxies: tuple[str, ...], url: str
) -> None:
    """The real server's own trust in local proxies changes nothing."""
    headers = FORWARDED | {"X-Forwarded-For": "203.0.113.9"}
    with serving(build(service, tmp_path, trusted_proxies=proxies)) as own_url:
        async with httpx.AsyncClient(base_url=own_url, timeout=PATIENCE_S) as client:
            assert (await url_of(client, **headers)).startswith(url)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"allowed_hosts": ["https://a.example"]}, "allowed_hosts holds 'https://a.example'; it must be"),
        ({"allowed_hosts": ["a.example:80"]}, "allowed_hosts holds 'a.example:80'; it must be"),
        ({"allowed_origins": ["a.example"]}, "allowed_origins holds 'a.example'; it must be"),
        ({"allowed_origins": ["https://a.example/"]}, "allowed_origins holds 'https://a.example/'; it must be"),
        ({"public_url": "a.example:8000"}, "public_url is 'a.example:8000'; it must be a URL such as"),
        ({"public_url": "https://a.example?b"}, "public_url is 'https://a.example.b'; it must be a URL such as"),
        ({"trusted_proxies": ["a.example"]}, "trusted_proxies holds 'a.example'; it must be an address"),
    ],
    ids=json.dumps,
)
def test_what_can_never_match_is_refused_at_start(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AppConfig.model_validate({"models": [{"name": "m"}], "api": field})
