"""Users call the application through real Serve, real HTTP, the official client and handles; two CPU ranks a gang."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import av
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.deployments.support.bare import (
    BAD_BODIES,
    assert_alike,
    assert_same_picture,
    bare_frames,
    bare_previews,
    begun,
    frames_of,
)
from tests.deployments.support.files import file_of, noise
from tests.deployments.support.live import (
    IMAGES,
    PROMPT,
    SMALL,
    TIMEOUT_S,
    finished,
    log_lines,
    picture,
    pixels_of,
    stream_of,
    wait_until,
)
from tests.end_to_end.conftest import CLIPS, EDITS, NUM_RUNNING, PICTURES, RECIPE, SMALL_CLIP, WARM_SIZE

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


def test_health_and_models(url: str, official: openai.OpenAI) -> None:
    assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
    listed: list[Any] = official.models.list().data
    kinds = {model.id: model.kind for model in listed}
    assert kinds == {PICTURES: "image", RECIPE: "image", CLIPS: "video", EDITS: "image"}


def test_a_seed_fixes_the_bytes_and_the_picture_is_that_of_the_bare_pipeline(
    official: openai.OpenAI, models: dict[str, Path]
) -> None:
    def draw(seed: int) -> bytes:
        answer: Any = official.images.generate(prompt=PROMPT, extra_body=SMALL | {"seed": seed})
        assert answer.data[0].seed == seed
        return base64.b64decode(answer.data[0].b64_json)

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again
    assert np.abs(pixels_of(first).astype(int) - pixels_of(other)).mean() > 2
    assert_same_picture(pixels_of(first), bare_frames(models, seed=1)[0])


@pytest.mark.parametrize("changes", [{"true_cfg_scale": 4.0, "negative_prompt": "blue"}, {"cache": "fast"}], ids=str)
def test_more_and_fewer_forwards_equal_the_bare_pipeline(
    url: str, models: dict[str, Path], changes: dict[str, Any]
) -> None:
    plain = {"seed": 3, "num_inference_steps": 10}
    data = picture(url, **plain, **changes)
    assert_same_picture(pixels_of(data), bare_frames(models, **plain, **changes)[0])
    assert not np.array_equal(pixels_of(data), pixels_of(picture(url, **plain)))


def test_a_picture_made_of_a_picture_equals_the_bare_pipeline(official: openai.OpenAI, models: dict[str, Path]) -> None:
    file, fields = file_of(noise(64, 64)), SMALL | {"seed": 4, "strength": 0.6}
    answer: Any = official.images.edit(image=file, prompt=PROMPT, extra_body=fields)
    edited = pixels_of(base64.b64decode(answer.data[0].b64_json))
    assert_same_picture(edited, bare_frames(models, image=file, **fields)[0])
    assert np.abs(edited.astype(int) - bare_frames(models, seed=4)[0]).mean() > 2


def test_streaming_with_previews_and_progress(official: openai.OpenAI, url: str, models: dict[str, Path]) -> None:
    extra = SMALL | {"seed": 5, "stream_progress": True}
    events: list[Any] = list(official.images.generate(prompt=PROMPT, stream=True, partial_images=3, extra_body=extra))
    steps = [(event.step, event.of) for event in events if event.type == "troupe.progress"]
    assert steps == [(step, 8) for step in range(1, 9)]
    partials = [event for event in events if event.type == "image_generation.partial_image"]
    assert [event.partial_image_index for event in partials] == [0, 1, 2]
    assert [event.step for event in partials] == [2, 4, 6]
    for event, bare_HWC in zip(partials, bare_previews(models, seed=5), strict=True):
        assert_same_picture(pixels_of(base64.b64decode(event.b64_json)), bare_HWC)
    assert base64.b64decode(events[-1].b64_json) == picture(url, seed=5), "previews change nothing"


def test_several_pictures_in_one_request(official: openai.OpenAI, url: str) -> None:
    answer: Any = official.images.generate(prompt=PROMPT, n=2, extra_body=SMALL | {"seed": 6})
    assert [image.seed for image in answer.data] == [6, 7]
    assert [base64.b64decode(image.b64_json) for image in answer.data] == [picture(url, seed=6), picture(url, seed=7)]


@pytest.mark.parametrize("image_format", ["png", "jpeg", "webp"])
def test_formats(official: openai.OpenAI, url: str, image_format: Literal["png", "jpeg", "webp"]) -> None:
    quality: dict[str, Any] = {} if image_format == "png" else {"output_compression": 95}
    answer: Any = official.images.generate(
        prompt=PROMPT, output_format=image_format, extra_body=SMALL | {"seed": 5}, **quality
    )
    data = base64.b64decode(answer.data[0].b64_json)
    assert Image.open(io.BytesIO(data)).format == image_format.upper()
    assert_alike(pixels_of(data), pixels_of(picture(url, seed=5)))


def test_by_url(official: openai.OpenAI, url: str) -> None:
    answer: Any = official.images.generate(prompt=PROMPT, response_format="url", extra_body=SMALL | {"seed": 5})
    data = httpx.get(answer.data[0].url, timeout=TIMEOUT_S).content
    assert data == picture(url, seed=5)
    with Image.open(io.BytesIO(data)) as image:
        settings = json.loads(image.info["troupe"])
    assert settings["software"].startswith("Troupe ")
    assert (settings["prompt"], settings["seed"], settings["size"]) == (PROMPT, 5, SMALL["size"])
    assert settings["num_inference_steps"] == SMALL["num_inference_steps"]


def test_server_timing_and_request_id(official: openai.OpenAI) -> None:
    raw = official.images.with_raw_response.generate(
        prompt=PROMPT, extra_headers={"x-request-id": "my-id-1"}, extra_body=SMALL
    )
    assert raw.headers.get_list("x-request-id") == ["my-id-1"]
    timing = dict(entry.split(";dur=") for entry in raw.headers["server-timing"].split(", "))
    milliseconds = {stage: float(value) for stage, value in timing.items()}
    assert set(milliseconds) == {"queue", "encode", "denoise", "decode", "total"}
    assert all(value >= 0 for value in milliseconds.values())
    assert milliseconds["denoise"] > 0
    assert milliseconds.pop("total") >= sum(milliseconds.values()) * 0.9
    wait_until(lambda: len(begun("my-id-1")) == 2, "both ranks log the client's request id")


def test_every_deployment_and_rank_logs_the_request_that_it_works_for(url: str) -> None:
    body, headers = {"prompt": "a red circle " * 40, **SMALL, "num_inference_steps": 1}, {"x-request-id": "traced"}
    assert httpx.post(f"{url}{IMAGES}", json=body, headers=headers, timeout=TIMEOUT_S).status_code == 200

    def is_logged_by(loggers: list[str], message: str) -> bool:
        lines = log_lines(message)
        return loggers == [line["logger"] for line in lines if line.get("request_id", "").startswith("traced")]

    by_message = {
        "the prompt has 122 tokens": ["pipelines.blocks.encoder"],
        "text is encoded": ["deployments.stages.text_encoder"],
        "job is queued": ["deployments.stages.denoiser"],
        "job begins": ["engines.gang.jobs.rank_jobs"] * 2,
        "latents are decoded": ["deployments.stages.vae_decoder"],
        f"POST {IMAGES} 200": ["troupe.access"],
    }
    for message, loggers in by_message.items():
        wait_until(partial(is_logged_by, loggers, message), message)


def test_answers_say_whether_the_shape_was_warm(official: openai.OpenAI, url: str) -> None:
    def headers_say(size: str) -> str:
        raw = official.images.with_raw_response.generate(prompt=PROMPT, extra_body=SMALL | {"size": size, "seed": 1})
        return str(raw.headers["x-troupe-warm"])

    assert headers_say(WARM_SIZE) == "true", "prepared at start"
    assert [headers_say("32x80") for _ in range(2)] == ["false", "true"], "prepared by the first that came"
    events: list[Any] = list(
        official.images.generate(prompt=PROMPT, stream=True, extra_body={"size": "32x112", "num_inference_steps": 2})
    )
    assert events[-1].timings["was_warm"] is False
    video: Any = official.videos.create_and_poll(
        prompt=PROMPT, poll_interval_ms=100, size=cast(Any, WARM_SIZE), extra_body={"num_inference_steps": 2}
    )
    assert video.timings["was_warm"] is True


def test_clip_from_prompt_to_deletion(official: openai.OpenAI, models: dict[str, Path]) -> None:
    extra = SMALL_CLIP | {"seed": 4, "fps": 8}
    video: Any = official.videos.create_and_poll(prompt=PROMPT, poll_interval_ms=100, extra_body=extra)
    assert (video.status, video.progress, video.seed) == ("completed", 100, 4)
    data = official.videos.download_content(video.id).read()
    with av.open(io.BytesIO(data)) as container:
        settings = json.loads(container.metadata["description"])
    assert (settings["prompt"], settings["seed"], settings["num_frames"]) == (PROMPT, 4, 9)
    frames = frames_of(data)
    bare = bare_frames(models, model=CLIPS, **extra)
    assert len(frames) == len(bare) == 9
    assert_alike(np.stack(frames), bare)
    thumbnail = official.videos.download_content(video.id, variant="thumbnail").read()
    assert Image.open(io.BytesIO(thumbnail)).format == "WEBP"
    assert official.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        official.videos.retrieve(video.id)


def test_clips_with_one_seed_are_the_same_bytes(official: openai.OpenAI) -> None:
    def film(seed: int) -> bytes:
        video = official.videos.create_and_poll(
            prompt=PROMPT, poll_interval_ms=100, extra_body=SMALL_CLIP | {"seed": seed, "num_inference_steps": 3}
        )
        return official.videos.download_content(video.id).read()

    one, again, other = film(1), film(1), film(2)
    assert one == again
    assert not np.array_equal(frames_of(one), frames_of(other))


async def test_of_jobs_in_flight_the_shortest_ends_first_and_each_sees_its_own_progress(url: str) -> None:
    lengths = [50, 40, 10]
    assert len(lengths) == NUM_RUNNING
    for _ in range(10):  # a machine under load may encode a prompt more slowly than it makes 40 steps
        steps, pictures = await one_after_the_other_begins(url, lengths)
        for length in lengths:
            assert [step for of, step in steps if of == length] == list(range(1, length + 1))
        if each_came_while_the_others_had_more_to_do(steps, lengths):
            break
    else:
        pytest.fail("the jobs were never in flight together")
    assert sorted(lengths, key=lambda length: steps.index((length, length))) == sorted(lengths)
    assert pictures == [picture(url, seed=length, num_inference_steps=length) for length in lengths]


async def one_after_the_other_begins(url: str, lengths: list[int]) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Request one picture of each length, each after the first step of the one before.

    Return (length, step) of each report of progress in the order of arrival, and the pictures.
    """
    steps: list[tuple[int, int]] = []

    async def follow(client: httpx.AsyncClient, length: int, has_begun: asyncio.Event) -> bytes:
        async with stream_of(client, {"seed": length, "num_inference_steps": length}) as events:
            async for event in events:
                if event["type"] == "troupe.progress":
                    steps.append((event["of"], event["step"]))
                    has_begun.set()
        return finished(event)

    async with httpx.AsyncClient(base_url=url) as client, asyncio.TaskGroup() as group:
        jobs = []
        for length in lengths:
            has_begun = asyncio.Event()
            jobs.append(group.create_task(follow(client, length, has_begun)))
            await has_begun.wait()
    return steps, [job.result() for job in jobs]


def each_came_while_the_others_had_more_to_do(steps: list[tuple[int, int]], lengths: list[int]) -> bool:
    """Return True if, at each job's first step, each earlier job has more steps left than the new one."""
    for place, length in enumerate(lengths):
        before = steps[: steps.index((length, 1))]
        if any(other - sum(of == other for of, _ in before) <= length for other in lengths[:place]):
            return False
    return True


@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_never_reaches_a_rank(url: str, stream: bool) -> None:
    before = len(log_lines("job begins"))
    body: Any
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for body, status, param in BAD_BODIES:
            answer = client.post(IMAGES, json={**body, "stream": stream})
            assert answer.status_code == status, (body, answer.text)
            assert answer.json()["error"]["param"] == param
    picture(url, num_inference_steps=1)
    wait_until(lambda: len(log_lines("job begins")) >= before + 2, "a good one is logged by both ranks")
    assert len(log_lines("job begins")) == before + 2
