"""The official client works unmodified with a real server."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import av
import httpx
import openai
import pytest
from PIL import Image

from pipelines.request import MediaRequest
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.fake_service import FakeService, colour
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture
async def official_async(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def pixels(data: bytes) -> tuple[str | None, tuple[int, int], Any]:
    image = Image.open(io.BytesIO(data))
    return image.format, image.size, image.convert("RGB").getpixel((5, 5))


def test_models(official: openai.OpenAI) -> None:
    models = official.models.list().data
    assert [model.id for model in models] == ["fake-pictures", "fake-clips"]
    model: Any = official.models.retrieve("fake-clips")  # has fields of our own, as below
    assert (model.object, model.owned_by, model.kind) == ("model", "troupe", "video")
    assert model.defaults["max_frames"] == 49


def test_image_as_base64(official: openai.OpenAI) -> None:
    answer = official.images.generate(prompt="a", size="32x48", extra_body={"seed": 300}, output_format="png")
    assert (answer.size, answer.output_format) == ("32x48", "png")
    pictures: Any = answer.data
    assert pictures[0].seed == 300
    assert pixels(base64.b64decode(pictures[0].b64_json)) == ("PNG", (32, 48), colour(300))


def test_image_by_url(official: openai.OpenAI) -> None:
    answer = official.images.generate(prompt="a", response_format="url", output_format="webp", n=2)
    pictures: Any = answer.data
    first, second = pictures
    assert second.seed == first.seed + 1
    assert first.url.startswith(str(official.base_url))
    got = httpx.get(first.url, timeout=PATIENCE_S)
    assert got.headers["content-type"] == "image/webp"
    assert pixels(got.content)[:2] == ("WEBP", (64, 64))


def test_image_stream(official: openai.OpenAI) -> None:
    extra = {"seed": 7, "num_inference_steps": 6, "stream_progress": True}
    events: list[Any] = list(official.images.generate(prompt="a", stream=True, partial_images=2, extra_body=extra))
    types = [event.type for event in events]
    assert types.count("troupe.progress") == 6
    assert types.count("image_generation.partial_image") == 2
    assert types[-1] == "image_generation.completed"
    partials = [event for event in events if event.type == "image_generation.partial_image"]
    assert [event.partial_image_index for event in partials] == [0, 1]
    assert all(pixels(base64.b64decode(event.b64_json))[0] == "PNG" for event in partials)
    assert pixels(base64.b64decode(events[-1].b64_json))[2] == colour(7)
    assert events[-1].usage.total_tokens == 0


async def test_image_stream_async(official_async: openai.AsyncOpenAI) -> None:
    stream = await official_async.images.generate(prompt="a", stream=True)
    assert [event.type async for event in stream] == ["image_generation.completed"]


def test_raw_response_headers(official: openai.OpenAI) -> None:
    raw = official.images.with_raw_response.generate(prompt="a", extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    stages = dict(part.split(";dur=") for part in raw.headers["server-timing"].split(", "))
    assert list(stages) == ["queue", "encode", "denoise", "decode", "total"]
    assert float(stages["denoise"]) >= 4 * 5


def test_errors_become_the_clients_exceptions(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        official.images.generate(prompt="a", size="33x48")
    assert caught.value.param == "size"
    assert "multiples of 16" in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        official.images.generate(prompt="a", model="gpt-image-2")
    assert missing.value.code == "model_not_found"


def test_error_inside_a_stream(official: openai.OpenAI, service: FakeService) -> None:
    def fail(request: MediaRequest, step: int) -> None:
        if step == 2:
            raise RuntimeError("secret detail")

    service.at_step = fail
    events = official.images.generate(prompt="a", stream=True, extra_body={"stream_progress": True})
    assert [next(events).type for _ in range(2)] == ["troupe.queued", "troupe.progress"]
    with pytest.raises(openai.APIError) as caught:
        list(events)
    assert caught.value.code == "internal"
    assert "secret" not in caught.value.message


def test_video_from_creation_to_deletion(official: openai.OpenAI) -> None:
    video: Any = official.videos.create_and_poll(
        prompt="a", model="fake-clips", size=cast(Any, "48x32"), seconds="4", poll_interval_ms=50
    )
    assert (video.status, video.progress, video.size, video.seconds) == ("completed", 100, "48x32", "4.125")
    content = official.videos.download_content(video.id).read()
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height) == ("h264", 48, 32)
        assert sum(1 for _ in container.decode(stream)) == video.num_frames == 33
    thumbnail = official.videos.download_content(video.id, variant="thumbnail").read()
    assert pixels(thumbnail)[:2] == ("WEBP", (48, 32))
    again: Any = official.videos.retrieve(video.id)
    assert again.timings["denoise_s"] > 0
    deleted = official.videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        official.videos.retrieve(video.id)


async def test_video_async_with_extra_fields(official_async: openai.AsyncOpenAI) -> None:
    extra = {"seed": 9, "num_frames": 5, "fps": 4, "num_inference_steps": 2, "negative_prompt": "b"}
    video: Any = await official_async.videos.create(prompt="a", extra_body=extra)
    assert (video.seed, video.num_frames, video.fps, video.seconds) == (9, 5, 4, "1.25")
    video = await official_async.videos.poll(video.id, poll_interval_ms=20)
    assert video.status == "completed"
    content = await official_async.videos.download_content(video.id)
    assert content.read()[4:8] == b"ftyp"


def test_video_pages(official: openai.OpenAI) -> None:
    ids = [official.videos.create(prompt=str(i)).id for i in range(5)]
    assert [video.id for video in official.videos.list(limit=2)] == ids[::-1]
    assert [video.id for video in official.videos.list(limit=2, order="asc")] == ids
    page = official.videos.list(limit=2, order="asc", after=ids[1])
    assert ([video.id for video in page.data], page.has_more, page.last_id) == (ids[2:4], True, ids[3])
    assert not official.videos.list(after=ids[0]).data


def test_api_keys(tmp_path: Path) -> None:
    with serving(build(FakeService(), tmp_path, api_keys=("alpha", "bêta"))) as url:
        good = openai.OpenAI(base_url=f"{url}/v1", api_key="alpha")
        assert good.images.generate(prompt="a").data
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(base_url=f"{url}/v1", api_key="alph").videos.list()
        assert caught.value.code == "invalid_api_key"
