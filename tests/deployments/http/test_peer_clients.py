"""The benchmark clients of other servers work, by the requests that they send.

SGLang 0.5.23, ``multimodal_gen/benchmarks/bench_serving.py``: clips as JSON, polled until ``status`` is completed, and
counted by ``num_outputs`` (pictures by the length of ``data``); with a picture as a form, where ``--extra-body`` is one
field. vLLM-Omni, ``benchmarks/diffusion/backends.py`` at commit 0780e453, ``/v1/videos``: an aiohttp form without
files, which is sent url-encoded, without a model; polled, fetched, deleted. Edits send ``bot_task`` for any model. Both
wait for a 200 of ``/health`` first and warm up with one or two steps. aiperf 0.13.0, ``endpoints`` and ``transports``:
pictures as JSON, or as a stream; clips as JSON or a form, polled; edits as a form.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from PIL import Image

from tests.deployments.http.conftest import build, serving
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished
from tests.deployments.http.support.events import sse
from tests.deployments.http.test_disconnect import until
from tests.deployments.support.fake_service import FakeService

EDITS = "/v1/images/edits"
PROMPT = "Random prompt 0 for benchmarking diffusion models"


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "png")
    return file.getvalue()


PNG = png()


@pytest.mark.parametrize(
    "profile",
    [
        {"num_inference_steps": 1},
        {"size": "64x32", "num_frames": 9, "num_inference_steps": 3, "fps": 4},
        {"seed": 42, "guidance_scale": 5.0, "enable_teacache": False},  # by --extra-body
    ],
)
async def test_clips_of_sglang(client: httpx.AsyncClient, profile: dict[str, Any]) -> None:
    assert (await client.get("/health")).status_code == 200
    await client.get("/v1/model_info")  # the benchmark ignores the answer
    payload = {"model": "fake-clips", "prompt": PROMPT, "num_outputs_per_prompt": 1, **profile}
    answer = await client.post("/v1/videos", json=payload)
    assert answer.status_code == 200, answer.text
    record = await finished(client, answer.json()["id"])
    assert (record["status"], record["num_outputs"]) == ("completed", 1)


async def test_pictures_of_sglang(client: httpx.AsyncClient) -> None:
    payload = {"model": "fake-pictures", "prompt": PROMPT, "n": 2, "response_format": "b64_json", "size": "64x64"}
    answer = await client.post(IMAGES, json=payload)
    assert len(answer.json()["data"]) == 2


async def test_clips_of_vllm_omni(url: str) -> None:
    """The form is of its own library, whose encoding is unique."""
    fields = {
        "negative_prompt": "Negative prompt 0 for benchmarking diffusion models",
        "prompt": PROMPT,
        "height": 48,
        "width": 64,
        "num_frames": 1,
        "num_inference_steps": 2,
        "seed": 42,
        "fps": 8,
    }
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, str(value))
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/videos", data=form) as answer:
            assert answer.request_info.headers["Content-Type"] == "application/x-www-form-urlencoded"
            assert answer.status == 200, await answer.text()
            job = await answer.json()
        assert job["status"] == "queued"
        job_url = f"{url}/v1/videos/{job['id']}"
        while job["status"] not in ("completed", "failed"):
            async with session.get(job_url) as poll:
                job = await poll.json()
        assert (job["status"], job["size"], job["num_frames"], job["num_inference_steps"]) == (
            "completed",
            "64x48",
            1,
            2,
        )
        async with session.get(f"{job_url}/content") as content:
            assert (await content.read())[4:8] == b"ftyp"
        async with session.delete(job_url) as deleted:
            assert deleted.status == 200


async def test_pictures_of_vllm_omni(client: httpx.AsyncClient) -> None:
    payload = {"model": "fake-pictures", "prompt": PROMPT, "n": 1, "size": "64x64", "response_format": "b64_json"}
    payload |= {"seed": 42, "num_inference_steps": 2}
    answer = await client.post(IMAGES, json=payload, headers={"Authorization": "Bearer EMPTY"})
    assert answer.status_code == 200, answer.text


@pytest.fixture
def picky(tmp_path: Path) -> Iterator[tuple[str, FakeService]]:
    """Yield the URL of a server whose models take pictures, and its service."""
    service = FakeService(takes_pictures=True)
    with serving(build(service, tmp_path)) as url:
        yield url, service


async def post_form(url: str, fields: dict[str, str], file: str, content_type: str) -> dict[str, Any]:
    """Return the answer to a form with a picture, as aiohttp writes it."""
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, value)
    form.add_field(file, PNG, filename="a red circle.png", content_type=content_type)
    async with aiohttp.ClientSession() as session, session.post(url, data=form) as answer:
        assert answer.request_info.headers["Content-Type"].startswith("multipart/form-data")
        assert answer.status == 200, await answer.text()
        body: dict[str, Any] = await answer.json()
        return body


async def test_edits_of_sglang(picky: tuple[str, FakeService]) -> None:
    url, service = picky
    extra = {"num_inference_steps": 3, "guidance_scale": 2.5, "seed": 7, "enable_teacache": False}  # by --extra-body
    fields = {"model": "fake-edits", "prompt": PROMPT, "response_format": "b64_json", "n": "2", "size": "64x64"}
    fields |= {name: str(value) for name, value in extra.items()}
    answer = await post_form(f"{url}{EDITS}", fields, "image", "application/octet-stream")
    assert len(answer["data"]) == 2
    asked = [(one.num_inference_steps, one.guidance_scale, one.seed) for one in service.performed]
    assert sorted(asked) == [(3, 2.5, 7), (3, 2.5, 8)]


async def test_clips_from_pictures_of_sglang(picky: tuple[str, FakeService]) -> None:
    url, service = picky
    extra = {"seed": 42, "num_inference_steps": 2, "true_cfg_scale": 3.0, "enable_teacache": False, "size": "64x64"}
    fields = {"model": "fake-begun-clips", "prompt": PROMPT, "num_outputs_per_prompt": "1", "size": "64x64"}
    fields |= {"extra_body": json.dumps(extra), "num_frames": "9", "fps": "4"}
    answer = await post_form(f"{url}/v1/videos", fields, "input_reference", "application/octet-stream")
    assert answer["num_outputs"] == 1
    await until(lambda: len(service.performed) == 1)
    (request,) = service.performed
    asked = (request.seed, request.num_inference_steps, request.true_cfg_scale, request.num_frames, request.fps)
    assert (asked, request.num_pictures) == ((42, 2, 3.0, 9, 4), 1)


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ("[1]", "extra_body", "must be a JSON object"),
        ("{", "extra_body", "must be a JSON object"),
        ('{"extra_body": {}}', "extra_body", "holds extra_body"),
        ('{"fps": 8}', "fps", "'4', but '8' in extra_body"),
        ('{"tea_cache": true}', "tea_cache", "Unknown field"),
        ('{"enable_teacache": true}', "enable_teacache", "not supported"),
    ],
)
async def test_an_extra_body_is_looked_at_like_the_rest(
    client: httpx.AsyncClient, extra: str, param: str, message: str
) -> None:
    answer = await client.post("/v1/videos", data={"prompt": "a", "fps": "4", "extra_body": extra})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]


async def test_an_extra_body_in_json(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {"prompt": "a", "extra_body": {"seed": 3, "num_inference_steps": None}, "num_inference_steps": 2}
    assert (await client.post(IMAGES, json=body)).status_code == 200
    assert [(one.seed, one.num_inference_steps) for one in service.performed] == [(3, 2)]


async def test_edits_of_vllm_omni(picky: tuple[str, FakeService]) -> None:
    url, service = picky
    fields = {"model": "fake-edits", "prompt": PROMPT, "size": "64x64", "response_format": "b64_json"}
    fields |= {"num_inference_steps": "2", "seed": "42", "guidance_scale": "2.5", "bot_task": "think"}
    answer = await post_form(f"{url}{EDITS}", fields, "image", "image/png")
    assert (len(answer["data"]), answer["size"]) == (1, "64x64")
    (request,) = service.performed
    assert (request.num_inference_steps, request.seed, request.guidance_scale) == (2, 42, 2.5)


@pytest.mark.parametrize("streams", [False, True])
async def test_pictures_of_aiperf(client: httpx.AsyncClient, streams: bool) -> None:
    payload = {"prompt": PROMPT, "model": "fake-pictures", "response_format": "b64_json", "n": 1}
    payload |= {"size": "64x64", "num_inference_steps": 2, "quality": "standard"}  # by --extra-inputs
    payload |= {"stream": True} if streams else {}
    answer = await client.post(IMAGES, json=payload, headers={"Accept": "text/event-stream"} if streams else {})
    assert answer.status_code == 200, answer.text
    if streams:
        assert [event["type"] for _, event in sse(answer)] == ["image_generation.completed"]
    else:
        assert answer.json()["data"][0]["b64_json"]


@pytest.mark.parametrize("as_form", [False, True])
async def test_clips_of_aiperf(client: httpx.AsyncClient, as_form: bool) -> None:
    payload: dict[str, Any] = {"prompt": PROMPT, "model": "fake-clips"}
    payload |= {"size": "32x32", "seconds": 1, "num_inference_steps": 2, "guidance_scale": 3.0}  # by --extra-inputs
    form = {name: (None, str(value)) for name, value in payload.items()}
    answer = await client.post("/v1/videos", **({"files": form} if as_form else {"json": payload}))
    assert answer.status_code == 200, answer.text
    record = await finished(client, answer.json()["id"])
    assert (record["status"], record["seconds"]) == ("completed", "1.125")
    content = await client.get(f"/v1/videos/{record['id']}/content")
    assert content.headers["content-type"] == "video/mp4"


async def test_edits_of_aiperf(picky: tuple[str, FakeService]) -> None:
    fields = {"prompt": PROMPT, "model": "fake-edits", "response_format": "b64_json", "n": "1"}
    answer = await post_form(f"{picky[0]}{EDITS}", fields, "image", "image/png")
    assert answer["data"][0]["b64_json"]
