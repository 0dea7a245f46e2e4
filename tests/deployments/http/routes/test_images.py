"""Pictures over raw HTTP: requests to the service, streams on the wire, files by URL."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from deployments.requests.rules import preview_steps
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.support.events import sse
from tests.deployments.support.fake_service import ETA_S, FakeService
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"


async def test_what_the_service_is_asked_for(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {
        "prompt": "a red circle",
        "negative_prompt": "blue",
        "model": "fake-pictures",
        "n": 2,
        "size": "128x32",
        "seed": 11,
        "num_inference_steps": 9,
        "guidance_scale": 2,
        "true_cfg_scale": 4.5,
        "stream": True,
        "partial_images": 2,
        "user": "me",
        "quality": "high",
        "background": None,
    }
    answer = await client.post(IMAGES, json=body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    first, second = sorted(service.performed, key=lambda request: request.seed)
    assert (first.model, first.kind, first.prompt, first.negative_prompt) == (
        "fake-pictures",
        "image",
        "a red circle",
        "blue",
    )
    assert (first.width, first.height, first.num_frames, first.fps) == (128, 32, 1, 0)
    assert (first.num_inference_steps, first.guidance_scale, first.true_cfg_scale) == (9, 2.0, 4.5)
    assert first.preview_steps == (3, 6)
    assert (first.seed, second.seed) == (11, 12)
    assert first.request_id.startswith("mine-")
    assert second.request_id.startswith("mine-")
    assert first.request_id != second.request_id
    completed = [data for name, data in sse(answer) if name == "image_generation.completed"]
    assert {data["image_index"] for data in completed} == {0, 1}
    assert all(data["safety_identifier"] == "me" and data["timings"]["total_s"] > 0 for data in completed)


async def test_defaults_and_random_seeds(client: httpx.AsyncClient, service: FakeService) -> None:
    for _ in range(2):
        answer = await client.post(IMAGES, json={"prompt": "a", "size": "auto"})
        assert answer.json()["size"] == "64x64"
    first, second = service.performed
    assert (first.num_inference_steps, first.guidance_scale, first.true_cfg_scale) == (4, 3.5, 1.0)
    assert first.seed != second.seed
    assert first.preview_steps == ()


async def test_same_seed_same_bytes(client: httpx.AsyncClient) -> None:
    bodies = [(await client.post(IMAGES, json={"prompt": "a", "seed": seed})).json()["data"] for seed in (5, 5, 6)]
    assert bodies[0] == bodies[1] != bodies[2]


async def test_jpeg_compression(client: httpx.AsyncClient) -> None:
    sizes = []
    for compression in (10, 100):
        body = {"prompt": "a", "output_format": "jpeg", "output_compression": compression, "response_format": "url"}
        made = (await client.post(IMAGES, json=body)).json()
        assert made["output_format"] == "jpeg"
        got = await client.get(made["data"][0]["url"])
        assert got.headers["content-type"] == "image/jpeg"
        sizes.append(len(got.content))
    assert sizes[0] < sizes[1]


async def test_stream_on_the_wire(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "seed": 0, "stream": True, "stream_progress": True, "partial_images": 1}
    body["num_inference_steps"] = 3
    async with client.stream("POST", IMAGES, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        assert answer.headers["x-request-id"].startswith("req_")
        await answer.aread()
    events = sse(answer)
    assert [name for name, _ in events] == [
        "troupe.queued",
        "troupe.progress",
        "troupe.progress",
        "image_generation.partial_image",
        "troupe.progress",
        "image_generation.completed",
    ]
    assert all(data["type"] == name for name, data in events)
    assert events[0][1] == {"type": "troupe.queued", "image_index": 0, "num_before": 0, "eta_s": ETA_S}
    assert events[1][1] == {"type": "troupe.progress", "image_index": 0, "step": 1, "of": 3, "eta_s": 0.1}
    assert events[3][1]["step"] == 2


async def test_places_are_told_once_all_pictures_have_one(client: httpx.AsyncClient) -> None:
    """The header before them is the whole request's: that of its slowest picture."""
    body = {"prompt": "a", "n": 2, "seed": 3, "stream": True, "stream_progress": True, "num_inference_steps": 2}
    answer = await client.post(IMAGES, json=body)
    places = [data for name, data in sse(answer) if name == "troupe.queued"]
    assert [(one["image_index"], one["num_before"], one["eta_s"]) for one in places] == [
        (0, 0, ETA_S + 3),
        (1, 1, ETA_S + 4),
    ]
    assert float(answer.headers["X-Troupe-Eta"]) == ETA_S + 4


async def test_what_is_no_stream_is_shown_by_who_reads_it_as_one(client: httpx.AsyncClient) -> None:
    with pytest.raises(AssertionError, match=r"no stream of events, but 400: .*\"param\":\"stream\""):
        sse(await client.post(IMAGES, json={"prompt": "a", "stream": "perhaps"}))


async def test_preview_steps_are_spread_and_never_the_last() -> None:
    assert preview_steps(20, 3) == (5, 10, 15)
    assert preview_steps(2, 3) == (1,)
    assert preview_steps(1, 3) == ()
    assert preview_steps(20, 0) == ()


async def test_files_expire_and_do_not_pile_up(service: FakeService, tmp_path: Path) -> None:
    url_body = {"prompt": "a", "response_format": "url"}
    async with client_of(build(service, tmp_path, file_lifetime_s=100, max_files_bytes=600)) as client:
        urls = [(await client.post(IMAGES, json=url_body)).json()["data"][0]["url"] for _ in range(8)]
        found = [(await client.get(url)).status_code for url in urls]
        assert found == sorted(found, reverse=True)  # the old ones are gone
        assert 404 in found
        assert found[-1] == 200
        last = tmp_path / "files" / urls[-1].rsplit("/", 1)[1]
        os.utime(last, (time.time() - 101,) * 2)
        assert (await client.get(urls[-1])).status_code == 404
        await client.post(IMAGES, json=url_body)
        assert not last.exists()


async def test_public_url(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, public_url="https://pictures.example/api/")) as client:
        made = (await client.post(IMAGES, json={"prompt": "a", "response_format": "url"})).json()
        assert made["data"][0]["url"].startswith("https://pictures.example/api/v1/files/")


async def test_page_and_documents(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert (await client.get(path)).status_code == 200


def test_health_over_a_real_server(url: str) -> None:
    answer = httpx.get(f"{url}/health", timeout=PATIENCE_S)
    models = {"fake-pictures": "ready", "fake-clips": "ready"}
    assert answer.json() == {"status": "ready", "models": models, "storage": "ok"}
