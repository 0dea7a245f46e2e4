"""The whole application takes adapters, masks, first frames, clips and sound, on gangs of two ranks over HTTP."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from pipelines.media.clip import encode_clip
from pipelines.request import MediaRequest
from tests.deployments.support.bare import assert_same_picture, bare_frames, frames_of
from tests.deployments.support.files import file_of
from tests.deployments.support.live import TIMEOUT_S, config_of, live, picture, pixels_of
from tests.pipelines.lora.support.tiny_lora import loader, request_of, write_lora
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_animate,
    tiny_helios,
    tiny_ltx,
    tiny_pictures,
    tiny_vace,
    tiny_whole,
)
from tests.pipelines.support.references.own_call import as_it_is, own_state
from tests.pipelines.support.references.own_clips import sounding_blocks
from tests.pipelines.support.references.picture_cases import drawn, mask_of
from tests.pipelines.support.references.video import Clip, frames
from tests.pipelines.support.references.video import picture as smooth

pytestmark = pytest.mark.slow

ADAPTER, SCALE = "ink", 0.8
SIZE = (80, 64)
FPS = 16
CLIP = Clip(make=tiny_ltx.ltx2_few_layers, reference=sounding_blocks, num_pictures=1, changes={"true_cfg_scale": 1.0})
MAKERS: dict[str, Callable[[Path], Path]] = {
    "drawing": tiny.flux,
    "painting": tiny_pictures.flux2_klein,
    "filming": CLIP.make,
    "enlarging": tiny_ltx.ltx2_two_stages,
    "extending": tiny_helios.helios,
    "changing": tiny_whole.wan_over,
    "masking": tiny_vace.wan_vace,
    "animating": tiny_animate.wan_animate2_segments,
}
ALONE = ("changing",)
"""Models whose pipeline's own call runs on one rank."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def adapter(folders: Mapping[str, Path]) -> Path:
    return write_lora(folders["drawing"], folders["drawing"].parent / ADAPTER, seed=1)


@pytest.fixture(scope="module")
def url(folders: Mapping[str, Path], adapter: Path, ray_cluster: None) -> Iterator[str]:
    with live(with_adapter(config_of(folders), adapter)) as url:
        yield url


def clip_file(width: int, height: int, num_frames: int) -> bytes:
    return encode_clip(np.stack([np.asarray(frame) for frame in frames(width, height, num_frames)]), fps=FPS)


def with_adapter(config: ServeConfig, adapter: Path) -> ServeConfig:
    document = config.model_dump(mode="json")
    model = document["applications"][0]["args"]["models"][0]
    for one in document["applications"][0]["args"]["models"]:
        if one["name"] in ALONE:
            one["denoiser"] |= {"num_ranks": 1, "strategy": "auto"}
    model["loras"] = [{"name": ADAPTER, "path": str(adapter), "scale": SCALE}]
    return parse_config(document)


def own_pixels(folder: Path, request: MediaRequest, adapters: Mapping[Path, float]) -> NDArray[Any]:
    """Return the pixels of diffusers' own pipeline with its own adapters."""
    change = loader(adapters) if adapters else as_it_is
    found: NDArray[Any] = own_state(folder, request, change=change).get("images")[0].movedim(0, -1).float().numpy()
    whole: NDArray[np.uint8] = np.rint(255 * found).astype(np.uint8)
    return whole


def test_requests_with_and_without_an_adapter(url: str, folders: Mapping[str, Path], adapter: Path) -> None:
    folder = folders["drawing"]
    request = request_of(folder)
    asked = {"prompt": request.prompt, "size": f"{request.width}x{request.height}", "seed": request.seed}
    asked["num_inference_steps"] = request.num_inference_steps
    plain = picture(url, model="drawing", **asked)
    named = picture(url, model=f"drawing:{ADAPTER}", **asked)
    scaled = picture(url, model="drawing", lora=[{"name": ADAPTER, "scale": -0.5}], **asked)
    assert picture(url, model="drawing", **asked) == plain
    for served, adapters in ((plain, {}), (named, {adapter: SCALE}), (scaled, {adapter: -0.5})):
        assert_same_picture(pixels_of(served), own_pixels(folder, request, adapters))
    assert np.abs(pixels_of(named).astype(int) - pixels_of(plain)).mean() > 1


def test_adapters_are_listed_and_unknown_ones_refused(url: str) -> None:
    cards = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"]
    assert f"drawing:{ADAPTER}" in {card["id"] for card in cards}
    asked = {"model": "drawing", "prompt": "a red circle", "lora": [{"name": "oil"}]}
    refused = httpx.post(f"{url}/v1/images/generations", json=asked, timeout=TIMEOUT_S)
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert ADAPTER in refused.json()["error"]["message"]


def opacity_of(mask: Image.Image) -> bytes:
    """Return a file like those of OpenAI's client: transparent parts are to be painted."""
    picture = mask.convert("RGBA")
    picture.putalpha(mask.point(lambda value: 255 - value))
    return file_of(picture)


def test_a_picture_is_painted_over_inside_a_mask(url: str, folders: Mapping[str, Path]) -> None:
    sent, left = file_of(drawn(*SIZE, seed=0)), mask_of(*SIZE)
    fields = {"size": f"{SIZE[0]}x{SIZE[1]}", "num_inference_steps": 4, "seed": 5, "strength": 0.7}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=TIMEOUT_S, max_retries=0)
    words: dict[str, Any] = {"model": "painting", "prompt": "a red circle", "image": sent}
    answer: Any = client.images.edit(**words, mask=opacity_of(left), extra_body=fields)
    served = pixels_of(base64.b64decode(answer.data[0].b64_json))
    for mask, is_same in ((left, True), (ImageOps.invert(left), False)):
        (expected,) = bare_frames(dict(folders), **words, mask=opacity_of(mask), **fields)
        assert (np.abs(served.astype(int) - expected).max() <= 1) == is_same


def test_a_clip_with_sound_begins_with_a_picture(url: str, folders: Mapping[str, Path]) -> None:
    request = CLIP.request(folders["filming"])
    file = file_of(smooth(request.width, request.height))
    fields = {"model": "filming", "prompt": request.prompt}
    fields |= {"size": f"{request.width}x{request.height}", "num_frames": str(request.num_frames), "seed": "5"}
    fields |= {"num_inference_steps": "2", "guidance_scale": "1"}
    reference = {"input_reference": ("first.png", file, "image/png")}
    answer = httpx.post(f"{url}/v1/videos/sync", data=fields, files=reference, timeout=TIMEOUT_S)
    assert answer.status_code == httpx.codes.OK, answer.text
    expected = CLIP.own(folders["filming"])["videos"][0]
    frames = np.stack(frames_of(answer.content))
    assert len(frames) == request.num_frames
    own = (255 * expected.movedim(1, -1).float().numpy()).clip(0, 255)
    assert np.abs(frames.mean((1, 2)) - own.mean((1, 2))).max() < 12, "equal up to lossy compression"
    with av.open(io.BytesIO(answer.content), "r") as container:
        (sound,) = container.streams.audio
        played_s = float(sum(frame.samples for frame in container.decode(sound)) / sound.rate)
    assert played_s == pytest.approx(request.num_frames / request.fps, abs=0.2)


def test_a_clip_is_made_in_two_passes_of_one_job(url: str, folders: Mapping[str, Path]) -> None:
    """The gang reports the steps of both."""
    body: dict[str, Any] = {"model": "enlarging", "prompt": "a red circle", "seed": 5, "size": "192x128", "fps": FPS}
    body |= {"num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1, "second_stage_sigmas": [0.9, 0.7, 0.4]}
    record = httpx.post(f"{url}/v1/videos", json=body, timeout=TIMEOUT_S).json()
    progress = set()
    while record["status"] in ("queued", "in_progress"):
        progress.add(record["progress"])
        time.sleep(0.01)
        record = httpx.get(f"{url}/v1/videos/{record['id']}", timeout=TIMEOUT_S).json()
    assert (record["status"], record["size"]) == ("completed", "192x128"), record
    assert progress <= {0, 20, 40, 60, 80, 99}
    content = httpx.get(f"{url}/v1/videos/{record['id']}/content", timeout=TIMEOUT_S).content
    served, expected = np.stack(frames_of(content)), bare_frames(dict(folders), **body)
    assert served.shape == expected.shape == (5, 128, 192, 3)
    assert np.abs(served.mean((1, 2)) - expected.mean((1, 2))).max() < 12, "equal up to lossy compression"
    plain = bare_frames(dict(folders), **{name: body[name] for name in body if name != "second_stage_sigmas"})
    assert not np.array_equal(plain, expected)


@pytest.mark.parametrize(
    ("model", "length", "fields"),
    [("extending", 33, {"num_frames": 37}), ("changing", 9, {"strength": 0.5, "num_inference_steps": 4})],
)
def test_a_clip_is_made_of_a_clip_and_of_that_another(
    url: str, folders: Mapping[str, Path], model: str, length: int, fields: dict[str, Any]
) -> None:
    """It runs on two ranks by blocks, and on one by the pipeline's own call; then again by the result's id."""
    body = {"model": model, "prompt": "a red circle", "seed": 5, "size": "64x64", "fps": FPS, "num_inference_steps": 2}
    body |= fields
    file = clip_file(80, 64, length)
    form = {name: str(value) for name, value in body.items()}
    answer = httpx.post(f"{url}/v1/videos/sync", data=form, files={"video": file}, timeout=TIMEOUT_S)
    assert answer.status_code == httpx.codes.OK, answer.text
    served = np.stack(frames_of(answer.content))
    expected = bare_frames(dict(folders), **body, video=file)
    assert served.shape == expected.shape == (fields.get("num_frames", length), 64, 64, 3)
    assert np.abs(served.mean((1, 2)) - expected.mean((1, 2))).max() < 12, "equal up to lossy compression"
    remix = f"{url}/v1/videos/{answer.headers['X-Troupe-Video-Id']}/remix"
    record = httpx.post(remix, json=body, timeout=TIMEOUT_S).json()
    while record["status"] in ("queued", "in_progress"):
        time.sleep(0.2)
        record = httpx.get(f"{url}/v1/videos/{record['id']}", timeout=TIMEOUT_S).json()
    assert (record["status"], record["model"]) == ("completed", model), record
    assert f"/{record['remixed_from_video_id']}/" in remix


def test_a_part_of_a_clip_is_made_anew(url: str, folders: Mapping[str, Path]) -> None:
    """The mask is a clip, or a picture for all frames."""
    body = {"model": "masking", "prompt": "a red circle", "seed": 5, "fps": FPS, "num_inference_steps": 2}
    files = {"video": clip_file(64, 64, 5), "mask": clip_file(64, 64, 5)}
    picture = file_of(mask_of(64, 64))
    form = {name: str(value) for name, value in body.items()}
    made = []
    for sent in (files, {**files, "mask": picture}, {"video": files["video"]}):
        answer = httpx.post(f"{url}/v1/videos/sync", data=form, files=sent, timeout=TIMEOUT_S)
        assert answer.status_code == httpx.codes.OK, answer.text
        served, expected = np.stack(frames_of(answer.content)), bare_frames(dict(folders), **body, size=None, **sent)
        assert served.shape == expected.shape == (5, 64, 64, 3)
        assert np.abs(served.mean((1, 2)) - expected.mean((1, 2))).max() < 12, "equal up to lossy compression"
        made.append(expected)
    assert not np.array_equal(made[0], made[2])
    assert not np.array_equal(made[1], made[2])


def test_a_character_moves_like_a_clip(url: str, folders: Mapping[str, Path]) -> None:
    """It has two segments. The character's picture decides the shape; both picture and clip are required."""
    body = {"model": "animating", "prompt": "a red circle", "seed": 5, "fps": FPS, "num_inference_steps": 2}
    files = {
        "input_reference": ("a.png", file_of(smooth(64, 96)), "image/png"),
        "video": ("a.mp4", clip_file(80, 64, 13), "video/mp4"),
    }
    form = {name: str(value) for name, value in body.items()}
    answer = httpx.post(f"{url}/v1/videos/sync", data=form, files=files, timeout=TIMEOUT_S)
    assert answer.status_code == httpx.codes.OK, answer.text
    served = np.stack(frames_of(answer.content))
    along = {name: data for name, (_, data, _) in files.items()}
    expected = bare_frames(dict(folders), **body, size=None, **along)
    assert served.shape == expected.shape == (13, 96, 64, 3)
    assert np.abs(served.mean((1, 2)) - expected.mean((1, 2))).max() < 12, "equal up to lossy compression"
    for missing in files:
        rest = {name: file for name, file in files.items() if name != missing}
        refused = httpx.post(f"{url}/v1/videos", data=form, files=rest, timeout=TIMEOUT_S)
        assert refused.status_code == httpx.codes.BAD_REQUEST, missing
        assert refused.json()["error"]["param"] == missing
