"""Results of one key are visible to no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.usage.api_keys import hash_of
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
KEYS = ("alpha", "beta")


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def create(client: httpx.AsyncClient, key: str) -> str:
    answer = await client.post("/v1/videos", json={"prompt": "a"}, headers=by(key))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def listed(client: httpx.AsyncClient, key: str, **query: Any) -> list[str]:
    page = (await client.get("/v1/videos", params=query, headers=by(key))).json()
    return [video["id"] for video in page["data"]]


async def finish(client: httpx.AsyncClient, video_id: str, key: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        status = "queued"
        while status != "completed":
            answer = await client.get(f"/v1/videos/{video_id}", headers=by(key))
            assert answer.status_code == 200, answer.text
            status = answer.json()["status"]
            await asyncio.sleep(0.02)


async def test_clips_are_there_for_the_key_that_made_them(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=KEYS)) as client:
        of_alpha = [await create(client, "alpha") for _ in range(3)]
        of_beta = await create(client, "beta")
        await finish(client, of_alpha[0], "alpha")
        path = f"/v1/videos/{of_alpha[0]}"
        reads = (path, f"{path}/content", f"{path}/events", f"/v1/videos?after={of_alpha[0]}")
        requests = [*(("GET", url) for url in reads), ("DELETE", path)]
        for method, url in requests:
            error = error_of(await client.request(method, url, headers=by("beta")), 404)
            assert error["code"] == "video_not_found"
            nobodys = error_of(await client.request(method, url.replace(of_alpha[0], VIDEO), headers=by("beta")), 404)
            assert nobodys["message"].replace(VIDEO, of_alpha[0]) == error["message"], "it tells nothing"
        assert await listed(client, "beta") == [of_beta]
        assert await listed(client, "alpha") == of_alpha[::-1]
        assert await listed(client, "alpha", limit=1, after=of_alpha[1]) == of_alpha[:1]
        for method, url in requests:
            answer = await client.request(method, url, headers=by("alpha"))
            assert answer.status_code == 200, (method, url)
        assert await listed(client, "alpha") == of_alpha[:0:-1]


VIDEO = f"video_{'0' * 32}"


async def test_keys_may_share(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=KEYS, share_between_keys=True)) as client:
        made = await create(client, "alpha")
        assert await listed(client, "beta") == [made]
        assert (await client.delete(f"/v1/videos/{made}", headers=by("beta"))).status_code == 200
        url = await picture_url(client, "alpha")
        assert (await client.get(url, headers=by("beta"))).status_code == 200


async def test_what_was_made_without_keys_is_there_for_none(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path)) as client:
        made = str((await client.post("/v1/videos", json={"prompt": "a"})).json()["id"])
    async with client_of(build(service, tmp_path, api_keys=KEYS)) as client:
        assert await listed(client, "alpha") == []
        assert (await client.get(f"/v1/videos/{made}", headers=by("alpha"))).status_code == 404
        of_alpha = await create(client, "alpha")
    async with client_of(build(service, tmp_path)) as client:
        ids = [video["id"] for video in (await client.get("/v1/videos")).json()["data"]]
        assert ids == [of_alpha, made], "without keys, everything is everybody's"


async def picture_url(client: httpx.AsyncClient, key: str) -> str:
    body = {"prompt": "a", "response_format": "url"}
    return str((await client.post(IMAGES, json=body, headers=by(key))).json()["data"][0]["url"])


async def test_files_are_not_there_for_other_keys(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=KEYS)) as client:
        url = await picture_url(client, "alpha")
        assert (await client.get(url, headers=by("alpha"))).status_code == 200
        assert error_of(await client.get(url, headers=by("beta")), 404)["param"] == "name"
        assert (await client.get(url, headers=by("gamma"))).status_code == 200, "a foreign key changes nothing"
        assert (await client.get(url)).status_code == 200, "the name is the secret"


async def test_files_of_keys_are_swept_like_others(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=KEYS, max_files_bytes=600)) as client:
        urls = [await picture_url(client, KEYS[index % 2]) for index in range(8)]
        answers = [(await client.get(url)).status_code for url in urls]
    assert answers[0] == 404
    assert answers[-1] == 200


async def test_no_key_is_on_the_disk(service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = "a-very-particular-key"
    async with client_of(build(service, tmp_path, api_keys=(key,))) as client:
        await create(client, key)
        await picture_url(client, key)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert all(key.encode() not in path.read_bytes() for path in files)
    assert any(hash_of(key).encode() in path.read_bytes() for path in files)
    assert key not in caplog.text


@pytest.mark.parametrize(
    ("settings", "status", "start"),
    [
        ({}, 200, "http://pictures.example:81/v1/files/"),
        ({"public_url": "https://own.example"}, 200, "https://own.example/v1/files/"),
        ({"allowed_hosts": ("own.example",)}, 403, ""),
        ({"allowed_hosts": ("pictures.example",)}, 200, "http://pictures.example:81/v1/files/"),
    ],
)
async def test_urls_have_the_name_that_the_keys_holder_sent(
    service: FakeService, tmp_path: Path, settings: dict[str, Any], status: int, start: str
) -> None:
    """A public name has precedence; names are limited by ``allowed_hosts``, and only key holders get URLs."""
    body, host = {"prompt": "a", "response_format": "url"}, {"Host": "pictures.example:81"}
    async with client_of(build(service, tmp_path, api_keys=KEYS, **settings)) as client:
        answer = await client.post(IMAGES, json=body, headers=by("alpha") | host)
        assert answer.status_code == status
        assert status != 200 or answer.json()["data"][0]["url"].startswith(start)
        stranger = await client.post(IMAGES, json=body, headers=by("gamma") | host)
        assert stranger.status_code == (401 if status == 200 else 403)
        assert "pictures.example:81/" not in stranger.text
