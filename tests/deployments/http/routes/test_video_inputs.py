"""Input clips come as files, as JSON, by a file's or clip's id, and by OpenAI's remixes and edits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from deployments.clips.clips import Clips
from deployments.http.context import ApiContext
from pipelines.media.clip import encode_clip
from pipelines.media.sound import Sound
from pipelines.request import Lora
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.routes.test_videos import finished
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import DRIVEN_CLIPS, REFERRED_CLIPS, FakeService
from tests.deployments.support.files import data_url, file_of, noise
from tests.support.patience import PATIENCE_S

CHANGED, CONTINUED = "fake-changed-clips", "fake-continued-clips"
WIDTH, HEIGHT, FPS, NUM_FRAMES = 48, 32, 8, 11
LEVELS = np.arange(20, 20 + 20 * NUM_FRAMES, 20, dtype=np.uint8)
TOLERANCE = 6
FILE = encode_clip(np.broadcast_to(LEVELS[:, None, None, None], (NUM_FRAMES, HEIGHT, WIDTH, 3)).copy(), FPS)
URL = data_url(FILE, "video/mp4")
HZ, RATE = 440, 32_000
TIMES_S = np.arange(NUM_FRAMES * RATE // FPS) / RATE
TONE = encode_clip(
    np.broadcast_to(LEVELS[:, None, None, None], (NUM_FRAMES, HEIGHT, WIDTH, 3)).copy(),
    FPS,
    Sound(samples_CT=np.sin(2 * np.pi * HZ * TIMES_S)[None].astype(np.float32) / np.float32(2), rate=RATE),
)
TONE_URL = data_url(TONE, "video/mp4")
VIDEOS = "/v1/videos"


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_clips=True)


@pytest.fixture
async def locked(service: FakeService, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(build(service, tmp_path, api_keys=("alpha", "beta"))) as client:
        yield client


def levels(service: FakeService) -> list[float]:
    """Return the greys of the newest request's input clip."""
    request, video = service.performed[-1], service.inputs[-1].video
    assert video is not None
    assert (video.width, video.height, video.fps) == (request.width, request.height, request.fps)
    assert video.num_frames == request.num_video_frames
    return [float(np.asarray(frame).mean()) for frame in video.frames()]


async def made(client: httpx.AsyncClient, answer: httpx.Response, **headers: str) -> dict[str, Any]:
    """Return the record of a clip once it is completed."""
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = await finished(client, answer.json()["id"])
    assert record["status"] == "completed"
    return record


@pytest.mark.parametrize("clip", [{"video": URL}, {"reference_video": {"video_url": URL}}], ids=["text", "object"])
async def test_a_clip_by_json(client: httpx.AsyncClient, service: FakeService, clip: dict[str, Any]) -> None:
    """It decides size and length: 9 of 11 frames, since the model makes 1 + a multiple of 4."""
    record = await made(client, await client.post(VIDEOS, json={"prompt": "a", **clip}))
    assert (record["model"], record["size"], record["num_frames"], record["fps"]) == (CHANGED, "48x32", 9, FPS)
    assert record["remixed_from_video_id"] is None
    assert levels(service) == pytest.approx(LEVELS[:9], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["reference_video", "video[video_url]"])
async def test_a_clip_in_a_form(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    for value in (FILE, (None, URL)):
        answer = await client.post("/v1/videos/sync", data={"prompt": "a"}, files={name: value})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
        assert levels(service) == pytest.approx(LEVELS[:9], abs=TOLERANCE)


async def test_length_rate_and_size_are_what_the_request_says(client: httpx.AsyncClient, service: FakeService) -> None:
    fields = {"prompt": "a", "video": URL, "fps": 4, "num_frames": 5, "size": "64x64", "strength": 0.75}
    await made(client, await client.post(VIDEOS, json=fields))
    assert levels(service) == pytest.approx([*LEVELS[::2][:5]], abs=TOLERANCE)
    request = service.performed[-1]
    assert (request.width, request.height, request.num_frames, request.strength) == (64, 64, 5, 0.75)


async def test_a_clip_whose_nearest_size_is_no_fixed_point(client: httpx.AsyncClient, service: FakeService) -> None:
    """The nearest size of 32x146 is 32x144, and that of 32x144 is 32x128: it is rounded once."""
    file = encode_clip(np.full((5, 146, 32, 3), 90, np.uint8), FPS)
    record = await made(client, await client.post(VIDEOS, json={"prompt": "a", "video": data_url(file, "video/mp4")}))
    assert record["size"] == "32x144"
    assert levels(service) == pytest.approx([90] * 5, abs=TOLERANCE)


async def test_a_model_that_goes_on_from_a_clip_makes_its_own_length(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    answer = await client.post(VIDEOS, json={"prompt": "a", "model": CONTINUED, "video": URL, "num_frames": 25})
    record = await made(client, answer)
    assert record["num_frames"] == 25
    assert levels(service) == pytest.approx(LEVELS, abs=TOLERANCE)
    await made(client, await client.post(VIDEOS, json={"prompt": "a", "model": CONTINUED}))
    assert service.inputs[-1].video is None


async def test_a_model_of_both_makes_the_picture_s_shape_and_shows_the_whole_clip(tmp_path: Path) -> None:
    """The clip of 48 x 32 is centred in 32 x 64: 21 rows, with black above and below."""
    service = FakeService(defaults={"driven": DRIVEN_CLIPS})
    picture = data_url(file_of(Image.new("RGB", (32, 64), "white")))
    along: dict[str, Any] = {"video": URL, "input_reference": picture}
    async with client_of(build(service, tmp_path)) as client:
        record = await made(client, await client.post(VIDEOS, json={"prompt": "a", "model": "driven", **along}))
        assert (record["size"], record["num_frames"]) == ("32x64", 9)
        (image, *_), video = service.inputs[-1].pictures, service.inputs[-1].video
        assert video is not None
        assert (image.width, image.height, video.width, video.height) == (32, 64, 32, 64)
        rows = np.asarray(video.frames()[-1]).mean((1, 2))
        assert [round(rows[place]) for place in (0, 18, 46, 63)] == [0, 0, 0, 0]
        assert rows[26:38] == pytest.approx(LEVELS[8], abs=TOLERANCE)
        given = {"prompt": "a", "model": "driven", "size": "64x64", **along}
        assert (await made(client, await client.post(VIDEOS, json=given)))["size"] == "64x64"
        for missing, told in (("video", "send one as video"), ("input_reference", "this model takes exactly 1")):
            body = {"prompt": "a", "model": "driven", **along}
            error = error_of(await client.post(VIDEOS, json={**body, missing: None}), 400)
            assert (error["param"], told in error["message"]) == (missing, True), error
        cards = (await client.get("/v1/models")).json()["data"]
        (card,) = (one for one in cards if one["id"] == "driven")
        assert card["capabilities"] == ["image-to-video", "video-to-video"]
        assert card["defaults"]["shaped_by_picture"]


async def test_a_clip_that_is_too_short_is_to_blame(tmp_path: Path) -> None:
    """The error does not name the result's length, which the request does not contain."""
    driven = replace(DRIVEN_CLIPS, min_frames=13, min_video_frames=13)
    picture = data_url(file_of(Image.new("RGB", (32, 64), "white")))
    async with client_of(build(FakeService(defaults={"driven": driven}), tmp_path)) as client:
        body = {"prompt": "a", "model": "driven", "video": URL, "input_reference": picture}
        error = error_of(await client.post(VIDEOS, json=body), 400)
    assert error["param"] == "video"
    assert f"video has {len(LEVELS)} frames at the clip's rate; this model takes from 13 to 49" in error["message"]


async def test_a_file_is_named_by_its_id(client: httpx.AsyncClient, service: FakeService) -> None:
    form: dict[str, Any] = {"data": {"purpose": "user_data"}, "files": {"file": ("a.mp4", FILE)}}
    file = (await client.post("/v1/files", **form)).json()
    content = await client.get(f"/v1/files/{file['id']}/content")
    assert (content.content, content.headers["content-type"]) == (FILE, "application/octet-stream")
    for video in (file["id"], {"file_id": file["id"]}):
        await made(client, await client.post(VIDEOS, json={"prompt": "a", "video": video}))
        assert levels(service) == pytest.approx(LEVELS[:9], abs=TOLERANCE)
    await client.delete(f"/v1/files/{file['id']}")
    for gone in (file["id"], {"file_id": "file-1"}, {"id": "video_1"}):  # an unknown form of id is no URL
        error = error_of(await client.post(VIDEOS, json={"prompt": "a", "video": gone}), 404)
        assert error["param"] == "video"


async def source(client: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    """Return a finished clip of a model without inputs."""
    answer = await client.post(VIDEOS, json={"prompt": "a", "model": "fake-clips", "seed": 90}, headers=headers)
    record: dict[str, Any] = answer.json()
    while record["status"] != "completed":
        record = (await client.get(f"{VIDEOS}/{record['id']}", headers=headers)).json()
    return record


async def test_a_clip_of_ours_is_changed_by_remix_edits_and_id(client: httpx.AsyncClient, service: FakeService) -> None:
    before = await source(client)
    answers = [
        await client.post(f"{VIDEOS}/{before['id']}/remix", json={"prompt": "b"}),
        await client.post(f"{VIDEOS}/{before['id']}/remix", data={"prompt": "b"}),
        await client.post(f"{VIDEOS}/edits", json={"prompt": "b", "reference_video": {"id": before["id"]}}),
        await client.post(f"{VIDEOS}/edits", data={"prompt": "b"}, files={"video[id]": (None, before["id"])}),
        await client.post(VIDEOS, json={"prompt": "b", "video": before["id"]}),
    ]
    for answer in answers:
        record = await made(client, answer)
        assert (record["model"], record["prompt"]) == (CHANGED, "b")
        assert record["remixed_from_video_id"] == before["id"]
        assert (record["num_frames"], record["size"]) == (before["num_frames"], before["size"])
    assert service.inputs[-1] == service.inputs[-2] != service.inputs[0]


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_edits_and_remixes_of_the_official_client(url: str, service: FakeService) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        first = client.videos.edit(prompt="a", video=("a.mp4", FILE))
        client.videos.poll(first.id, poll_interval_ms=20)
        remix = client.videos.remix(first.id, prompt="b")
        done = client.videos.poll(remix.id, poll_interval_ms=20)
        assert (done.status, done.prompt, done.remixed_from_video_id) == ("completed", "b", first.id)
    assert [one.num_video_frames for one in service.performed] == [9, 9]


async def test_a_remix_is_by_the_model_of_its_clip_if_that_takes_clips(client: httpx.AsyncClient) -> None:
    fields = {"prompt": "a", "model": CONTINUED, "num_frames": 17}
    before = await made(client, await client.post(VIDEOS, json=fields))
    remix = f"{VIDEOS}/{before['id']}/remix"
    assert (await made(client, await client.post(remix, json={"prompt": "b"})))["model"] == CONTINUED


async def test_a_remix_without_an_adapter_is_not_by_a_model_that_needs_one(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await made(client, await client.post(VIDEOS, json={"prompt": "a", "model": CONTINUED, "num_frames": 17}))
    cards = dict(service.cards())
    own = cards[CONTINUED]
    cards[CONTINUED] = replace(own, defaults=replace(own.defaults, video_needs_lora=True), loras=(Lora(name="ink"),))
    monkeypatch.setattr(service, "cards", lambda: cards)
    remix = f"{VIDEOS}/{before['id']}/remix"
    for lora, model in (([], CHANGED), ([{"name": "ink"}], CONTINUED)):
        record = await made(client, await client.post(remix, json={"prompt": "b", "lora": lora}))
        assert record["model"] == model
    named = await client.post(remix, json={"prompt": "b", "model": CHANGED})
    assert (await made(client, named))["model"] == CHANGED


async def test_an_edit_brings_its_file(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(f"{VIDEOS}/edits", data={"prompt": "b"}, files={"video": ("a.mp4", FILE)})
    assert (await made(client, answer))["remixed_from_video_id"] is None
    assert levels(service) == pytest.approx(LEVELS[:9], abs=TOLERANCE)
    bodies: list[dict[str, Any]] = [{"prompt": "b"}, {"prompt": "b", "video": []}]
    for body in bodies:
        error = error_of(await client.post(f"{VIDEOS}/edits", json=body), 400)
        assert (error["param"], error["code"]) == ("video", "missing_field")


async def test_clips_and_files_of_other_keys_are_not_there(locked: httpx.AsyncClient) -> None:
    alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    before = await source(locked, **alpha)
    form: dict[str, Any] = {"data": {"purpose": "user_data"}, "files": {"file": ("a.mp4", FILE)}}
    file = (await locked.post("/v1/files", **form, headers=alpha)).json()
    for video in (before["id"], file["id"]):
        body = {"prompt": "a", "video": video}
        error_of(await locked.post(VIDEOS, json=body, headers=beta), 404)
        assert (await locked.post(VIDEOS, json=body, headers=alpha)).status_code == 200
    error_of(await locked.post(f"{VIDEOS}/{before['id']}/remix", json={"prompt": "a"}, headers=beta), 404)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a model of words": ({"model": "fake-clips", "video": URL}, "video", "this model takes no input clip"),
    "no clip": ({"model": CHANGED}, "video", "this model needs an input clip"),
    "too long": ({"model": CONTINUED, "video": URL, "fps": 24}, "video", "more than 17 frames at 24 fps"),
    "too short": ({"model": CONTINUED, "video": URL, "fps": 2}, "video", "video has 3 frames"),
    "more than it has": ({"video": URL, "num_frames": 17}, "num_frames", "17 frames at 8 fps, and video has 9"),
    "more seconds": ({"video": URL, "seconds": 3}, "seconds", "seconds is 3, which is 25 frames at 8 fps"),
    "a size": ({"video": URL, "size": "50x50"}, "size", "multiples of 16"),
    "frames": ({"video": URL, "num_frames": 8}, "num_frames", "1 + a multiple of 4"),
    "two clips": ({"video": [URL, URL]}, "video", "2 input clips were sent; this model takes at most 1"),
    "an unknown key": ({"video": {"url": URL}}, "video", "it must be one clip"),
    "no id": ({"video": {"file_id": "a.mp4"}}, "video", '{"file_id": that of a file of /v1/files}'),
    "a file in place of an id": ({"video": {"id": URL}}, "video", '{"id": that of a clip of /v1/videos}'),
    "another address": ({"video": "https://example.com/a.mp4"}, "video", "clips are not fetched from elsewhere"),
    "noise": ({"video": data_url(b"noise", "video/mp4")}, "video", "is no clip that can be read"),
    "no sound": ({"video": URL, "keep_audio": True}, "keep_audio", "no input clip has a sound"),
    "a sound of no clip": ({"model": CONTINUED, "keep_audio": True}, "keep_audio", "does not run beside the clip"),
    "a sound for words": ({"model": "fake-clips", "keep_audio": True}, "keep_audio", "takes no clip"),
    "two sounds": ({"video": URL, "keep_audio": True, "generate_sound": True}, "keep_audio", "a sound of its own"),
    "a picture as well": ({"video": URL, "input_reference": URL}, "input_reference", "1 input picture was sent"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_clip_that_cannot_be(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    fields, param, message = REFUSED[name]
    error = error_of(await client.post(VIDEOS, json={"prompt": "a", **fields}), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert service.performed == []


async def test_a_remix_needs_a_clip_that_is_there_and_a_model_that_takes_it(tmp_path: Path) -> None:
    async with client_of(build(FakeService(), tmp_path)) as client:
        before = await source(client)
        remix = f"{VIDEOS}/{before['id']}/remix"
        error = error_of(await client.post(remix, json={"prompt": "b"}), 400)
        assert (error["param"], "takes no input clip" in error["message"]) == ("video", True)
        error_of(await client.post(f"{VIDEOS}/video_{'0' * 32}/remix", json={"prompt": "b"}), 404)
    for field in ("video", "input_reference"):
        async with client_of(build(FakeService(takes_clips=True), tmp_path)) as client:
            error = error_of(await client.post(remix, json={"prompt": "b", field: URL}), 400)
            assert (error["param"], "the path names the input clip" in error["message"]) == (field, True)


async def test_a_clip_that_is_not_finished_cannot_be_changed(tmp_path: Path) -> None:
    def fail(request: Any) -> None:
        raise ValueError("no such scene")

    async with client_of(build(FakeService(takes_clips=True, before=fail), tmp_path)) as client:
        made_of_words = (await client.post(VIDEOS, json={"prompt": "a", "model": "fake-clips"})).json()
        await finished(client, made_of_words["id"])
        error = error_of(await client.post(VIDEOS, json={"prompt": "a", "video": made_of_words["id"]}), 409)
        assert (error["param"], "it is failed" in error["message"]) == ("video", True)


@pytest.mark.parametrize(("limit", "status"), [(len(FILE), 200), (len(FILE) - 1, 413)])
async def test_a_large_clip_is_413(tmp_path: Path, limit: int, status: int) -> None:
    async with client_of(build(FakeService(takes_clips=True), tmp_path, max_video_bytes=limit)) as client:
        answer = await client.post(VIDEOS, json={"prompt": "a", "video": URL})
        assert answer.status_code == status
        if status == 413:
            assert error_of(answer, 413)["code"] == "video_too_large"


async def test_frames_of_requests_under_way_take_no_more_memory_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first request is always admitted; the next one is refused until its frames are on the disk."""
    entered, may_go, submit = asyncio.Event(), asyncio.Event(), Clips.submit

    async def slow(*args: Any) -> Any:
        entered.set()
        await may_go.wait()
        return await submit(*args)

    monkeypatch.setattr(Clips, "submit", slow)
    async with client_of(build(FakeService(takes_clips=True), tmp_path, max_open_upload_bytes=1)) as client:
        body = {"prompt": "a", "video": URL}
        first = asyncio.create_task(client.post(VIDEOS, json=body))
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
        assert error_of(await client.post(VIDEOS, json=body), 503)["code"] == "server_full"
        may_go.set()
        assert (await first).status_code == 200
        assert (await client.post(VIDEOS, json=body)).status_code == 200


async def test_a_file_by_its_id_takes_memory_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, may_go, decode = asyncio.Event(), asyncio.Event(), ApiContext._decoded

    async def slow(*args: Any) -> Any:
        if not entered.is_set():
            entered.set()
            await may_go.wait()
        return await decode(*args)

    monkeypatch.setattr(ApiContext, "_decoded", slow)
    limits: dict[str, Any] = {"max_body_bytes": 2 * len(FILE), "max_open_upload_bytes": len(FILE)}
    async with client_of(build(FakeService(takes_clips=True), tmp_path, **limits)) as client:
        form: dict[str, Any] = {"data": {"purpose": "user_data"}, "files": {"file": ("a.mp4", FILE)}}
        body = {"prompt": "a", "video": (await client.post("/v1/files", **form)).json()["id"]}
        first = asyncio.create_task(client.post(VIDEOS, json=body))
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
        assert error_of(await client.post(VIDEOS, json=body), 503)["code"] == "server_full"
        may_go.set()
        assert (await first).status_code == 200


async def test_models_say_that_they_take_clips(client: httpx.AsyncClient) -> None:
    models = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert models[CHANGED]["capabilities"] == ["video-to-video"]
    assert models[CONTINUED]["capabilities"] == ["text-to-video", "video-to-video"]
    assert models["fake-pictures"]["capabilities"] == ["text-to-image"]
    assert models[CONTINUED]["defaults"]["max_video_frames"] == 17


@pytest.fixture
def referred(service: FakeService) -> str:
    service.defaults = {"fake-referred-clips": REFERRED_CLIPS}
    return "fake-referred-clips"


async def test_references_are_a_clip_and_pictures(
    client: httpx.AsyncClient, service: FakeService, referred: str
) -> None:
    """The clip is at most as long as the result."""
    pictures = [data_url(file_of(noise(64, 48, seed=seed))) for seed in range(2)]
    fields = {"model": referred, "prompt": "a", "size": "48x32", "num_frames": 5}
    await made(client, await client.post(VIDEOS, json={**fields, "video": URL, "input_reference": pictures}))
    assert levels(service) == pytest.approx(LEVELS[:5], abs=TOLERANCE)
    assert [(one.width, one.height) for one in service.inputs[-1].pictures] == [(64, 48)] * 2
    await made(client, await client.post(VIDEOS, json={**fields, "input_reference": pictures[:1]}))
    assert (service.performed[-1].num_pictures, service.performed[-1].num_video_frames) == (1, 0)
    refused = error_of(await client.post(VIDEOS, json=fields), 400)
    assert (refused["param"], refused["message"].split(":")[0]) == ("input_reference", "this model needs a reference")


async def test_the_list_of_models_says_what_references_are(
    client: httpx.AsyncClient, service: FakeService, referred: str
) -> None:
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    limits = cards[referred]["defaults"]
    assert (limits["needs_source"], limits["takes_both"], limits["cuts_video"]) == (True, True, True)
    assert cards[referred]["capabilities"] == ["image-to-video", "video-to-video"]


async def test_references_are_several_clips_with_their_sound(
    client: httpx.AsyncClient, service: FakeService, referred: str
) -> None:
    """They come by JSON, by form and by ids; the model says that it uses sound, and how many it takes."""
    service.defaults = {referred: replace(REFERRED_CLIPS, max_videos=3, video_sound_rate=16_000)}
    fields = {"model": referred, "prompt": "a", "size": "48x32", "num_frames": 5}
    before = await source(client)
    urls = [data_url(TONE, "video/mp4"), {"video_url": URL}, {"id": before["id"]}]
    await made(client, await client.post(VIDEOS, json={**fields, "video": urls, "keep_audio": True}))
    form = {name: str(value) for name, value in fields.items()} | {"keep_audio": "true"}
    files: list[tuple[str, Any]] = [("video", TONE), ("video", FILE), ("video", (None, before["id"]))]
    answer = await client.post(VIDEOS, data=form, files=files)
    await made(client, answer)
    for request, inputs in zip(service.performed[-2:], service.inputs[-2:], strict=True):
        assert (request.num_video_frames, request.further_video_frames) == (5, (5, 5))
        assert (request.sound_samples, request.copies_sound) == ((10_000, 0, 0), False)
        assert [one.sound is not None for one in inputs.videos] == [True, False, False]
    assert service.inputs[-1] == service.inputs[-2]
    await made(client, await client.post(VIDEOS, json={**fields, "video": urls}))
    assert service.performed[-1].sound_samples == ()
    assert [one.sound for one in service.inputs[-1].videos] == [None] * 3
    error = error_of(await client.post(VIDEOS, json={**fields, "video": [URL] * 4}), 400)
    assert (error["param"], "4 input clips were sent; this model takes at most 3" in error["message"]) == (
        "video",
        True,
    )
    error = error_of(await client.post(VIDEOS, json={**fields, "video": [URL], "keep_audio": True}), 400)
    assert (error["param"], "no input clip has a sound" in error["message"]) == ("keep_audio", True)
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    limits = cards[referred]["defaults"]
    assert (limits["max_videos"], limits["video_sound_rate"]) == (3, 16_000)


async def test_the_sound_of_a_clip_that_is_changed_goes_into_the_result(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """They are its first 9 of 11 frames; the model makes no sound."""
    await made(client, await client.post(VIDEOS, json={"prompt": "a", "video": TONE_URL, "keep_audio": True}))
    request, (video,) = service.performed[-1], service.inputs[-1].videos
    assert (request.copies_sound, request.sound_samples) == (True, (9 * 48_000 // FPS,))
    assert video.sound is not None
    samples = np.frombuffer(video.sound.data, np.float32)
    assert np.abs(np.fft.rfft(samples)).argmax() == pytest.approx(HZ * 9 / FPS, abs=1)
    for keep_audio in (False, None):
        fields = {"prompt": "a", "video": TONE_URL, "keep_audio": keep_audio}
        await made(client, await client.post(VIDEOS, json=fields))
        assert (service.performed[-1].copies_sound, service.inputs[-1].videos[0].sound) == (False, None)
