"""A model that makes clips and pictures serves either route over raw HTTP, and no other."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
from PIL import Image

from deployments.http.app import uploads
from tests.deployments.http.support.events import sse
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.files import data_url, file_of, noise

IMAGES, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
BODY = {"prompt": "a red circle", "model": "fake-both", "seed": 4}


@pytest.fixture
def service() -> FakeService:
    return FakeService(makes_both=True)


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
async def test_pictures_are_of_one_frame_and_the_size_of_pictures(
    client: httpx.AsyncClient, service: FakeService, format: str
) -> None:
    answer = await client.post(IMAGES, json={**BODY, "n": 2, "output_format": format})
    assert answer.status_code == 200, answer.text
    assert {(one.kind, one.num_frames, one.fps, one.width, one.height) for one in service.performed} == {
        ("image", 1, 0, 96, 64)
    }
    assert answer.json()["size"] == "96x64"
    assert answer.headers["X-Troupe-Gpu-Seconds"] == "3.000"
    for one in answer.json()["data"]:
        image = Image.open(io.BytesIO(base64.b64decode(one["b64_json"])))
        assert (image.format, image.size) == (format.upper(), (96, 64))


async def test_pictures_come_as_a_stream_with_previews(client: httpx.AsyncClient) -> None:
    answer = await client.post(IMAGES, json={**BODY, "stream": True, "partial_images": 1})
    assert [name for name, _ in sse(answer)] == ["image_generation.partial_image", "image_generation.completed"]


async def test_clips_are_as_before(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(f"{VIDEOS}/sync", json=BODY)
    assert answer.headers["Content-Type"] == "video/mp4"
    (request,) = service.performed
    assert (request.kind, request.num_frames, request.fps, request.width) == ("video", 17, 8, 32)


@pytest.mark.parametrize(
    ("route", "more", "param", "code", "message"),
    [
        (IMAGES, {"model": "fake-clips"}, "model", "wrong_kind", "'fake-clips' makes videos, not images"),
        (VIDEOS, {"model": "fake-pictures"}, "model", "wrong_kind", "'fake-pictures' makes images, not videos"),
        (IMAGES, {"num_frames": 5}, "num_frames", "unknown_field", "num_frames"),
        (IMAGES, {"size": "640x640"}, "size", "invalid_value", "at most 16384 pixels"),
        (EDITS, {"image": data_url(file_of(noise(48, 32)))}, "image", "invalid_value", "this model takes none"),
    ],
)
async def test_what_it_cannot_is_refused(
    client: httpx.AsyncClient, route: str, more: dict[str, object], param: str, code: str, message: str
) -> None:
    answer = await client.post(route, json={**BODY, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert message in error["message"]


async def test_the_model_says_what_it_makes(client: httpx.AsyncClient) -> None:
    models = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert {name: one["kinds"] for name, one in models.items()} == {
        "fake-pictures": ["image"],
        "fake-clips": ["video"],
        "fake-both": ["video", "image"],
    }
    both = models["fake-both"]
    assert (both["kind"], both["defaults"]["fps"], both["picture_defaults"]["fps"]) == ("video", 8, 0)
    assert (both["picture_defaults"]["width"], both["picture_defaults"]["height"]) == (96, 64)
    assert models["fake-clips"]["picture_defaults"] is None


def test_pictures_may_come_along_where_one_is_taken(service: FakeService) -> None:
    """Here only clips take one."""
    assert set(uploads(service)) == {"/v1/videos", "/v1/videos/sync", "/v1/videos/edits"}
