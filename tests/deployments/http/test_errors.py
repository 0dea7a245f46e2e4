"""Bad input never reaches the service; every error has OpenAI's shape, its status, and the request's id."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.observability.metrics import REQUEST_FAILURES
from deployments.service.flow import DeployedService
from deployments.service.interface import ModelUnavailableError, Output, ServiceEvent
from deployments.service.readiness import Readiness
from engines.core.engine import JobFailedError
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.jobs.job import Progress
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest
from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.support.bad_bodies import BAD_IMAGES, BAD_VIDEOS
from tests.deployments.service.support.set_stages import Stages
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
PYTHON = re.compile(r"\^|\[0-9\]|\b(True|False|None|str|int|dict|string|integer|Input|pattern|parse)\b")
"""Words that no user's message may contain: regular expressions, and words of the server's language."""


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """Return an API without running jobs or a service: a request that passes the checks gives a 500."""
    return build(BareService(), tmp_path_factory.mktemp("data"))


class BareService(FakeService):
    def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[ServiceEvent, None]:
        raise AssertionError(request)


@pytest.mark.parametrize("case", BAD_IMAGES)
async def test_bad_image_request(untouched: FastAPI, case: str) -> None:
    body, param, message = BAD_IMAGES[case]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(untouched), base_url="http://localhost") as client:
        answer = await client.post(IMAGES, content=body, headers={"Content-Type": "application/json"})
    error = error_of(answer, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert len(error["message"]) < 700
    assert not PYTHON.search(error["message"])


@pytest.mark.parametrize("as_form", [False, True], ids=["json", "form"])
@pytest.mark.parametrize("case", BAD_VIDEOS)
async def test_bad_video_request(untouched: FastAPI, case: str, as_form: bool) -> None:
    fields, param, message = BAD_VIDEOS[case]
    body = {"prompt": "a"} | fields
    form = {name: (None, str(value)) for name, value in body.items()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(untouched), base_url="http://localhost") as client:
        answer = await client.post("/v1/videos", **({"files": form} if as_form else {"json": body}))
    error = error_of(answer, 400)
    assert error["param"] == param
    assert message in error["message"]
    assert not PYTHON.search(error["message"])


class Ready(Readiness):
    async def not_ready(self, max_age_s: float = 0.0) -> Mapping[str, str]:
        return {}


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (JobFailedError("the latents of this request are not finite"), 500, "job_failed"),
        (ValueError("the latents of this request are not finite with the adapters ink"), 400, "invalid_value"),
    ],
)
async def test_a_picture_that_is_not_finite_is_told_and_counted(
    tmp_path: Path, failure: Exception, status: int, code: str
) -> None:
    name = "fake-pictures"
    step = Progress(job_id="j", step=1, num_steps=2, num_ranks=2)
    stages: Any = Stages([step, failure])
    service: Any = DeployedService(FakeService().cards(), {name: stages}, Ready({name: ()}))
    count = REQUEST_FAILURES.labels(name, type(failure).__name__)
    before = [sample.value for metric in count.collect() for sample in metric.samples]
    async with client_of(build(service, tmp_path)) as client:
        error = error_of(await client.post(IMAGES, json={"prompt": "a", "model": name}), status)
    assert (error["code"], error["message"].endswith(str(failure))) == (code, True)
    after = [sample.value for metric in count.collect() for sample in metric.samples]
    assert after[0] == before[0] + 1
    assert stages.num_attempts == 1


async def test_health_says_that_the_data_folder_refuses(client: httpx.AsyncClient, tmp_path: Path) -> None:
    assert (await client.get("/health")).json()["storage"] == "ok"
    (tmp_path / "videos").rename(tmp_path / "away")  # at once: the server may be writing into it
    (tmp_path / "videos").touch()
    until_s = time.monotonic() + PATIENCE_S
    while (health := (await client.get("/health")).json())["storage"] == "ok" and time.monotonic() < until_s:
        await asyncio.sleep(0.05)
    assert "cannot be used: Not a directory" in health["storage"]
    assert health["status"] == "ready", "pictures are made"


async def test_bad_forms(client: httpx.AsyncClient) -> None:
    refused: list[tuple[list[tuple[str, Any]], str]] = [
        ([("prompt", ("p.txt", b"a"))], "is a file"),
        ([("prompt", (None, "a")), ("input_reference", ("i.png", b"..."))], "this model takes none"),
        ([("prompt", (None, "a")), ("reference", ("i.png", b"..."))], "Unknown field 'reference'"),
    ]
    for files, message in refused:
        assert message in error_of(await client.post("/v1/videos", files=files), 400)["message"]
    broken = await client.post("/v1/videos", content=b"--x", headers={"Content-Type": "multipart/form-data"})
    assert error_of(broken, 400)["code"] == "invalid_value"


async def test_unknown_model_route_method_and_content_type(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(IMAGES, json={"prompt": "a", "model": "nope"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake-pictures" in error["message"]
    assert error_of(await client.get("/v1/models/nope"), 404)["code"] == "model_not_found"
    assert error_of(await client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(await client.get("/v1/files/../secrets"), 404)
    assert error_of(await client.get(f"/v1/files/{'0' * 32}.png"), 404)["param"] == "name"
    for method, path in (("GET", IMAGES), ("PATCH", "/v1/videos"), ("DELETE", "/health")):
        answer = await client.request(method, path)
        assert error_of(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"]
    answer = await client.post(
        IMAGES, content="prompt=a", headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert "application/json" in error_of(answer, 415)["message"]
    unknown = error_of(await client.get("/v1/videos", params={"ordre": "asc"}), 400)
    assert unknown["message"] == "Unknown field 'ordre': did you mean order? Known fields: after, limit, order"
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "9" * 5000}, {"order": "up"}, {"page": 2}):
        assert error_of(await client.get("/v1/videos", params=params), 400)["param"] == next(iter(params))
    for after in ("video_1", f"video_{'0' * 32}", "\x00"):
        assert error_of(await client.get("/v1/videos", params={"after": after}), 404)["param"] == "after"


async def test_body_too_large(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, max_body_bytes=1000)) as client:
        told = await client.post(IMAGES, json={"prompt": "a" * 1000})
        assert error_of(told, 413)["code"] == "body_too_large"

        async def chunks() -> AsyncGenerator[bytes]:
            for _ in range(20):
                yield b" " * 100

        answer = await client.post(IMAGES, content=chunks(), headers={"Content-Type": "application/json"})
        assert "1000 bytes" in error_of(answer, 413)["message"]
        part = await client.post("/v1/videos", files={"prompt": (None, "a" * 1000)})
        error_of(part, 413)
    assert service.performed == []


def test_endless_body_is_cut_off(service: FakeService, tmp_path: Path) -> None:
    num_sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b" " * 10_000

    with serving(build(service, tmp_path, max_body_bytes=20_000)) as url:
        answer = httpx.post(
            url + IMAGES, content=endless(), headers={"Content-Type": "application/json"}, timeout=PATIENCE_S
        )
    assert answer.status_code == 413
    assert num_sent < 10_000


async def test_api_keys(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=("alpha", "bêta"))) as client:
        answer = await client.post(IMAGES, content="not even JSON")
        assert error_of(answer, 401)["code"] == "missing_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer alph", "Bearer alphaa", "Bearer ", "Basic alpha", "alpha", "Bearer \xff"):
            headers = {b"Authorization": wrong.encode("latin-1")}
            for path in ("/v1/models", "/v1/videos", f"/v1/videos/video_{'0' * 32}", "/v1/models/nope"):
                assert error_of(await client.get(path, headers=headers), 401)["type"] == "authentication_error"
        for right in (b"Bearer alpha", b"bearer alpha", "Bearer bêta".encode()):
            assert (await client.get("/v1/models", headers={b"Authorization": right})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        own = {"Authorization": "Bearer alpha"}
        made = await client.post(IMAGES, json={"prompt": "a", "response_format": "url"}, headers=own)
        assert (await client.get(made.json()["data"][0]["url"])).status_code == 200  # the name is the secret


FAILURES = [
    (ModelUnavailableError("VaeDecoder-a failed to deploy"), 503, "model_not_ready", {"retry-after": "10"}),
    (QueueFullError(7, 3.2), 429, "queue_full", {"retry-after": "4"}),
    (GangBrokenError("rank 1 died"), 502, "gang_broken", {"x-should-retry": "false"}),
    (ValueError("prompt has 900 tokens; 512 are allowed"), 400, "invalid_value", {}),
    (RuntimeError("secret detail"), 500, "internal", {}),
    (UnicodeDecodeError("utf-8", b"", 0, 1, "secret detail"), 500, "internal", {}),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("raised", "status", "code", "headers"), FAILURES, ids=lambda value: type(value).__name__)
async def test_failures_of_the_service(
    client: httpx.AsyncClient,
    service: FakeService,
    raised: Exception,
    status: int,
    code: str,
    headers: dict[str, str],
    stream: bool,
) -> None:

    def fail(request: MediaRequest) -> None:
        raise raised

    service.before = fail
    answer = await client.post(IMAGES, json={"prompt": "a", "stream": stream, "n": 2})
    error = error_of(answer, status)
    assert error["code"] == code
    assert headers.items() <= dict(answer.headers).items()
    assert "secret" not in answer.text
    assert status == 500 or str(raised) in error["message"]


async def test_failures_in_a_stream_that_has_begun(client: httpx.AsyncClient, service: FakeService) -> None:
    def fail(request: MediaRequest, step: int) -> None:
        if step == 2:
            raise GangBrokenError("rank 0 died")

    service.at_step = fail
    answer = await client.post(IMAGES, json={"prompt": "a", "stream": True, "stream_progress": True})
    assert answer.status_code == 200
    *_, last = answer.text.split("\n\n")[:-1]
    name, data = (line.split(": ", 1)[1] for line in last.splitlines())
    event = json.loads(data)
    assert (name, event["type"], event["error"]["code"]) == ("error", "error", "gang_broken")


async def test_one_failing_picture_stops_the_others(client: httpx.AsyncClient, service: FakeService) -> None:
    service.step_s = 1000

    def fail(request: MediaRequest) -> None:
        if request.seed == 2:
            raise GangBrokenError("rank 0 died")

    service.before = fail
    error_of(await client.post(IMAGES, json={"prompt": "a", "n": 3, "seed": 1}), 502)
    assert len(service.closed) == 3
    assert service.finished == []


async def test_not_ready(client: httpx.AsyncClient, service: FakeService) -> None:
    service.reasons["fake-pictures"] = "loading weights"
    answer = await client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["models"] == {"fake-pictures": "loading weights", "fake-clips": "ready"}
    answer = await client.post(IMAGES, json={"prompt": "a"})
    assert "loading weights" in error_of(answer, 503)["message"]
    assert answer.headers["retry-after"]
    assert (await client.post("/v1/videos", json={"prompt": "a"})).status_code == 200
    service.reasons.clear()
    assert (await client.get("/health")).json()["status"] == "ready"


async def test_request_ids(client: httpx.AsyncClient) -> None:
    for given in ("abc-1.2:3_x", "f3b6e0c4-0000-4000-8000-000000000000"):
        assert (await client.get("/nope", headers={"X-Request-Id": given})).headers["x-request-id"] == given
    for wrong in (b"a b", b"a" * 129, b"", "ü".encode()):
        answer = await client.get("/health", headers={b"X-Request-Id": wrong})
        assert answer.headers["x-request-id"].startswith("req_")
    ids = {(await client.get("/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_proxy_that_answers_with_the_id_itself(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, sends_request_id=False)) as client:
        assert "x-request-id" not in (await client.get("/health")).headers
        for given in (b"mine", "a b/ü\n".encode("unicode_escape"), b"a" * 200, b""):
            await client.post(IMAGES, json={"prompt": "a"}, headers={b"X-Request-Id": given})
    ids = [request.request_id.rpartition("-")[0] for request in service.performed]
    assert ids[0] == "mine"
    assert ids[1].startswith("a b/")
    assert ids[2] == "a" * 128
    assert ids[3].startswith("req_")
