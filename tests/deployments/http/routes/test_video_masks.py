"""Masks and weights of input clips: a mask is a clip of equal length, or a picture for all frames."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from deployments.clips.clips import Clips
from pipelines.media.clip import encode_clip
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.routes.test_video_inputs import CHANGED, FILE, FPS, NUM_FRAMES, TOLERANCE, URL, VIDEOS, made
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import CHANGED_CLIPS, FakeService
from tests.deployments.support.files import data_url, file_of
from tests.support.patience import PATIENCE_S

MASKED = "masked"
KEPT, LEFT_HALF = 9, (0, 0, 24, 32)
"""Number of the clip's frames that the model takes, and its white half."""


def mask_clip(num_frames: int, fps: int = FPS) -> bytes:
    """Return a white bar that moves to the right, two columns a frame."""
    frames_FHWC = np.zeros((num_frames, 32, 48, 3), np.uint8)
    for number, frame_HWC in enumerate(frames_FHWC):
        frame_HWC[:, 2 * number : 2 * number + 16] = 255
    return encode_clip(frames_FHWC, fps)


def half(mode: str, ground: str, colour: Any) -> bytes:
    image = Image.new(mode, (48, 32), ground)
    image.paste(colour, LEFT_HALF)
    return file_of(image)


MASK = data_url(mask_clip(NUM_FRAMES), "video/mp4")
PICTURES = {
    "white": half("L", "black", 255),
    "transparent": half("RGBA", "black", (0, 0, 0, 0)),
}


@pytest.fixture
def service() -> FakeService:
    masked = replace(CHANGED_CLIPS, masks_video=True, takes_strength=False, control_scale=1.0)
    return FakeService(takes_clips=True, defaults={MASKED: masked})


def columns(service: FakeService) -> np.ndarray[Any, Any]:
    """Return the mean grey of each column of each frame of the request's mask."""
    request, video, mask = service.performed[-1], service.inputs[-1].video, service.inputs[-1].video_mask
    assert request.has_mask
    assert video is not None
    assert mask is not None
    assert (mask.width, mask.height, mask.num_frames) == (video.width, video.height, video.num_frames)
    return np.stack([np.asarray(frame).mean((0, 2)) for frame in mask.frames()])


@pytest.mark.parametrize("mask", [MASK, {"video_url": MASK}], ids=["text", "object"])
async def test_a_mask_that_moves(client: httpx.AsyncClient, service: FakeService, mask: object) -> None:
    """Without a named model, the one that takes masks is chosen."""
    record = await made(client, await client.post(VIDEOS, json={"prompt": "a", "video": URL, "mask": mask}))
    assert (record["model"], record["size"], record["num_frames"]) == (MASKED, "48x32", KEPT)
    greys_FW = columns(service)
    for number in range(KEPT):
        assert greys_FW[number, 2 * number + 4 : 2 * number + 12] == pytest.approx(255, abs=TOLERANCE)
        assert greys_FW[number, 2 * number + 22 :] == pytest.approx(0, abs=TOLERANCE)


async def test_files_of_a_form_and_the_id_of_one(client: httpx.AsyncClient, service: FakeService) -> None:
    mask = mask_clip(NUM_FRAMES)
    files: dict[str, Any] = {"video": (None, URL), "mask": mask}
    answer = await client.post("/v1/videos/sync", data={"prompt": "a"}, files=files)
    assert answer.status_code == 200, answer.text
    by_form = columns(service)
    sent = await client.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("m.mp4", mask)})
    body = {"prompt": "a", "video": URL, "mask": {"file_id": sent.json()["id"]}}
    await made(client, await client.post("/v1/videos/edits", json=body))
    assert np.array_equal(by_form, columns(service))


@pytest.mark.parametrize("name", ["white", "transparent"])
async def test_a_picture_is_the_mask_of_all_frames(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    mask = {"image_url": data_url(PICTURES[name])}
    await made(client, await client.post(VIDEOS, json={"prompt": "a", "video": URL, "mask": mask}))
    greys_FW = columns(service)
    assert len(greys_FW) == KEPT
    assert (greys_FW[:, :23] > 250).all()
    assert (greys_FW[:, 25:] < 5).all()


async def test_the_weight_of_a_clip(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {"prompt": "a", "video": URL, "control_scale": 0.5}
    await made(client, await client.post(VIDEOS, json={**body, "model": MASKED}))
    assert service.performed[-1].control_scale == 0.5
    error = error_of(await client.post(VIDEOS, json={**body, "model": CHANGED}), 400)
    assert (error["param"], "control_scale is 0.5" in error["message"]) == ("control_scale", True)


async def test_frames_of_a_mask_take_memory_like_those_of_its_clip(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask and two clips fit, two of each do not."""
    entered, may_go, submit = asyncio.Event(), asyncio.Event(), Clips.submit

    async def slow(*args: Any) -> Any:
        if not entered.is_set():
            entered.set()
            await may_go.wait()
        return await submit(*args)

    monkeypatch.setattr(Clips, "submit", slow)
    body = {"prompt": "a", "model": MASKED, "video": URL}
    limit = 3 * KEPT * 48 * 32 * 3
    async with client_of(build(service, tmp_path, max_open_upload_bytes=limit)) as client:
        first = asyncio.create_task(client.post(VIDEOS, json={**body, "mask": MASK}))
        async with asyncio.timeout(PATIENCE_S):
            await entered.wait()
        assert error_of(await client.post(VIDEOS, json={**body, "mask": MASK}), 503)["code"] == "server_full"
        assert (await client.post(VIDEOS, json=body)).status_code == 200
        may_go.set()
        assert (await first).status_code == 200


NOISE_FHWC = np.random.default_rng(3).integers(0, 256, (NUM_FRAMES, 32, 48, 3), np.uint8)
LARGE = {"video": encode_clip(NOISE_FHWC, FPS), "picture": file_of(Image.fromarray(NOISE_FHWC[0]))}
"""Masks with more bytes than the clip itself."""


@pytest.mark.parametrize("by_id", [False, True], ids=["data URL", "id"])
@pytest.mark.parametrize("kind", LARGE)
async def test_a_mask_has_the_limit_of_what_it_is(service: FakeService, tmp_path: Path, kind: str, by_id: bool) -> None:
    """It may exceed the limit of the other kind, and is refused above its own."""
    mask, answers = LARGE[kind], []
    for most, other in ((len(mask), len(FILE)), (len(mask) - 1, 1 << 20)):
        limits: dict[str, Any] = {"max_video_bytes": other, "max_picture_bytes": other, f"max_{kind}_bytes": most}
        async with client_of(build(service, tmp_path, **limits)) as client:
            sent = data_url(mask, "video/mp4")
            if by_id:
                kept = await client.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("m", mask)})
                sent = kept.json()["id"]
            answers.append(await client.post("/v1/videos/sync", json={"prompt": "a", "video": URL, "mask": sent}))
    assert answers[0].status_code == 200, answers[0].text
    error = error_of(answers[1], 413)
    assert (error["param"], error["code"]) == ("mask", f"{kind}_too_large")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too short": ({"mask": data_url(mask_clip(5), "video/mp4")}, "mask has 5 frames at 8 fps, and the clip 9"),
    "no clip": ({"video": None}, "this model takes a mask with a clip"),
    "a model without": ({"model": CHANGED}, "this model takes no mask"),
    "black": ({"mask": data_url(file_of(Image.new("L", (48, 32))))}, "mask marks nothing"),
    "noise": ({"mask": data_url(b"noise")}, "mask is no picture that can be read"),
    "two": ({"mask": [MASK, MASK]}, "it must be one picture or clip"),
    "another address": ({"mask": "https://example.com/a.mp4"}, "are not fetched from elsewhere"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_mask_that_cannot_be(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    fields, message = REFUSED[name]
    body = {"prompt": "a", "model": MASKED, "video": URL, "mask": MASK, **fields}
    error = error_of(await client.post(VIDEOS, json=body), 400)
    assert (error["param"], message in error["message"]) == ("mask", True), error
    assert service.performed == []
