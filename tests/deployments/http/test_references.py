"""First pictures of clips come from the official client and as JSON."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from pipelines.request import InputPicture, InputPictures
from tests.deployments.http.routes.test_videos import finished
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.files import data_url, file_of, noise

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

PICTURE = noise(48, 32)
FILE = file_of(PICTURE)
URL = data_url(FILE)
ONE = InputPictures(pictures=(InputPicture.of(PICTURE),))


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_pictures=True)


def test_a_clip_of_the_official_client(official: openai.OpenAI, service: FakeService) -> None:
    video = official.videos.create_and_poll(prompt="a", input_reference=("a", FILE), poll_interval_ms=20)
    assert (video.status, video.model, video.size) == ("completed", "fake-begun-clips", "48x32")
    assert service.inputs[-1] == ONE
    assert official.videos.create(prompt="a").model == "fake-clips"


@pytest.mark.parametrize("reference", [URL, {"image_url": URL}, [URL]], ids=["text", "object", "list"])
async def test_a_clip_by_json(client: httpx.AsyncClient, service: FakeService, reference: object) -> None:
    answer = await client.post("/v1/videos", json={"prompt": "a", "input_reference": reference})
    assert answer.status_code == 200, answer.text
    assert (await finished(client, answer.json()["id"]))["status"] == "completed"
    assert service.inputs == [ONE]


@pytest.mark.parametrize("name", ["input_reference", "input_reference[image_url]"])
async def test_a_clip_in_one_request(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    for value in (FILE, (None, URL)):
        answer = await client.post("/v1/videos/sync", data={"prompt": "a"}, files={name: value})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
        assert service.inputs.pop() == ONE


async def test_a_picture_at_a_frame(client: httpx.AsyncClient, service: FakeService) -> None:
    """It comes in JSON, and as text of a form."""
    written = {"prompt": "a", "num_frames": 17}
    by_json = {"json": {**written, "input_reference": URL, "frame_indices": [-1]}}
    by_form = {"data": {**written, "frame_indices": "[-1]"}, "files": {"input_reference": FILE}}
    for body in (by_json, by_form):
        answer = await client.post("/v1/videos/sync", **body)
        assert answer.status_code == 200, answer.text
        request = service.performed.pop()
        assert (request.frame_indices, request.num_pictures) == ((-1,), 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frame_indices": [17]}, "frame_indices has 17; it must be from 0 to 16, or from -17 to -1"),
        ({"frame_indices": [0, 1]}, "frame_indices has 2 numbers for 1 input picture"),
        ({"frame_indices": "first"}, "it must be a list of 1 to 64 whole numbers"),
        ({"frame_indices": []}, "it must be a list of 1 to 64 whole numbers"),
        ({"frame_indices": [0.5]}, "it must be a list of 1 to 64 whole numbers"),
        ({"frame_indices": [True]}, "it must be a list of 1 to 64 whole numbers"),
        ({"frame_indices": [10**30]}, "it must be a list of 1 to 64 whole numbers"),
    ],
)
async def test_a_picture_at_a_frame_that_cannot_be(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    body = {"prompt": "a", "num_frames": 17, "input_reference": URL, **fields}
    error = error_of(await client.post("/v1/videos", json=body), 400)
    assert error["param"] == "frame_indices"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "fake-clips", "input_reference": URL}, "1 input picture was sent; this model takes none"),
        ({"input_reference": [URL, URL]}, "2 input pictures were sent; this model takes"),
        ({"input_reference": {"file_id": "x"}}, "it must be a picture"),
    ],
    ids=["words alone", "two", "an uploaded file"],
)
async def test_a_clip_that_cannot_be(client: httpx.AsyncClient, fields: dict[str, Any], message: str) -> None:
    error = error_of(await client.post("/v1/videos", json={"prompt": "a", **fields}), 400)
    assert error["param"] == "input_reference"
    assert message in error["message"]
    assert (await client.get("/v1/videos")).json()["data"] == []
