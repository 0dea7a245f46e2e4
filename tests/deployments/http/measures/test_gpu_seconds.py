"""Every answer has the known GPU time: finished pictures and clips, streams, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.http.files import FileShelf
from engines.gang.errors import GangBrokenError
from pipelines.request import MediaRequest
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished, make
from tests.deployments.support.fake_service import GPU_S, FakeService

HEADER = "X-Troupe-Gpu-Seconds"
NUM_STEPS = 4
FAILS_AT = 3
SPENT = f"{GPU_S * (FAILS_AT - 1) / NUM_STEPS:.3f}"
FAILURES = [
    (ValueError("too large"), 400),
    (RuntimeError("a defect"), 500),
    (GangBrokenError("rank 1 died"), 502),
]


def failing(failure: Exception, step: int = FAILS_AT) -> FakeService:
    def fail(request: MediaRequest, at: int) -> None:
        if at == step:
            raise failure

    return FakeService(at_step=fail)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("failure", "status"), FAILURES)
async def test_an_error_says_what_was_spent_before_it(tmp_path: Path, failure: Exception, status: int) -> None:
    async with client_of(build(failing(failure), tmp_path)) as client:
        answer = await client.post(IMAGES, json={"prompt": "a"})
        assert (answer.status_code, answer.headers[HEADER]) == (status, SPENT)


async def test_of_several_pictures_it_is_all_that_was_spent(tmp_path: Path) -> None:
    """One picture fails at once; the other has done all its steps by then, or some."""
    service = FakeService()

    def fail(request: MediaRequest, at: int) -> None:
        if request.seed == 1 and at == NUM_STEPS:
            raise ValueError("too large")

    service.at_step = fail
    async with client_of(build(service, tmp_path)) as client:
        answer = await client.post(IMAGES, json={"prompt": "a", "n": 2, "seed": 0})
    own_s = GPU_S * (NUM_STEPS - 1) / NUM_STEPS
    assert answer.status_code == 400
    assert own_s < float(answer.headers[HEADER]) <= own_s + GPU_S


async def test_pictures_that_cannot_be_kept_were_made_all_the_same(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileShelf, "put", full)
    answer = await client.post(IMAGES, json={"prompt": "a", "response_format": "url"})
    assert (answer.status_code, answer.headers[HEADER]) == (507, f"{GPU_S:.3f}")


@pytest.mark.parametrize("body", [{"size": "63x64"}, {}])
async def test_an_error_before_any_work_says_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    async with client_of(build(failing(ValueError("too large"), step=1), tmp_path)) as client:
        answer = await client.post(IMAGES, json={"prompt": "a", **body})
        assert (answer.status_code, HEADER in answer.headers) == (400, False)


async def test_a_stream_says_it_of_each_picture(client: httpx.AsyncClient) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a", "n": 2, "stream": True})
    assert HEADER not in answer.headers
    assert [event["timings"]["gpu_s"] for event in events_of(answer)] == [GPU_S, GPU_S]


async def test_a_clip_says_it_in_its_record_and_in_its_last_event(client: httpx.AsyncClient) -> None:
    clip = await finished(client, (await make(client))["id"])
    assert clip["timings"]["gpu_s"] == GPU_S
    *_, last = events_of(await client.get(f"/v1/videos/{clip['id']}/events"))
    assert (last["type"], last["video"]["timings"]["gpu_s"]) == ("video.completed", GPU_S)
    answer = await client.post("/v1/videos/sync", json={"prompt": "a"})
    assert answer.headers[HEADER] == f"{GPU_S:.3f}"


@pytest.mark.parametrize(("failure", "status"), [FAILURES[0], FAILURES[2]])
async def test_a_clip_that_fails_says_what_was_spent(tmp_path: Path, failure: Exception, status: int) -> None:
    async with client_of(build(failing(failure), tmp_path)) as client:
        answer = await client.post("/v1/videos/sync", json={"prompt": "a"})
        assert (answer.status_code, answer.headers[HEADER]) == (status, SPENT)
        clip = await finished(client, (await make(client))["id"])
        for path, expected in ((f"/v1/videos/{clip['id']}", 200), (f"/v1/videos/{clip['id']}/content", 409)):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers[HEADER]) == (expected, SPENT)
