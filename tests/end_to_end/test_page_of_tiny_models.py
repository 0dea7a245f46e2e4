"""The web page sends a clip, pictures at frames and a control picture to tiny models of published architectures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.cli.serving import parse_config
from pipelines.media.clip import encode_clip
from tests.deployments.http.support.chromium import Chromium, chromium, needs_chromium
from tests.deployments.http.support.page_steps import fill, press, send, take, written
from tests.deployments.support.files import file_of
from tests.deployments.support.live import TIMEOUT_S, config_of, live
from tests.pipelines.support.checkpoints import tiny_ltx, tiny_whole
from tests.pipelines.support.references.video import frames, picture

pytestmark = [pytest.mark.slow, needs_chromium]

CHANGING, FILMING, FOLLOWING = "changing", "filming", "following"
MAKERS: dict[str, Callable[[Path], Path]] = {
    CHANGING: tiny_whole.wan_over,
    FILMING: tiny_ltx.ltx2_few_layers,
    FOLLOWING: tiny_whole.flux_controlled,
}
SIDE, FPS = 64, 16
ASKED: dict[str, Any] = {"prompt": "a red circle", "size": f"{SIDE}x{SIDE}", "seed": 5, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    document = config_of({name: make(root / name) for name, make in MAKERS.items()}).model_dump(mode="json")
    for model in document["applications"][0]["args"]["models"]:
        if model["name"] != FILMING:  # a pipeline's own call runs on one rank
            model["denoiser"] |= {"num_ranks": 1, "strategy": "auto"}
    with live(parse_config(document)) as url:
        yield url


@pytest.fixture
def page(url: str, tmp_path: Path) -> Iterator[Chromium]:
    with chromium(tmp_path / "browser") as browser:
        browser.resize(1366, 625)
        browser.open(url)
        yield browser


def ask(page: Chromium, model: str, **fields: object) -> None:
    take(page, model)
    fill(page, prompt=ASKED["prompt"], seed=ASKED["seed"], num_inference_steps=ASKED["num_inference_steps"], **fields)


def clip_on_card(page: Chromium, url: str) -> bytes:
    answer = httpx.get(f"{url}/v1/videos/{page.evaluate('gallery.firstChild.id')}/content", timeout=TIMEOUT_S)
    assert answer.status_code == httpx.codes.OK
    return answer.content


def clip_of(url: str, files: list[Any], **fields: Any) -> bytes:
    form = {name: str(value) for name, value in (ASKED | fields).items()}
    answer = httpx.post(f"{url}/v1/videos/sync", data=form, files=files, timeout=TIMEOUT_S)
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer.content


def test_a_clip_and_then_the_clip_that_was_made_of_it(page: Chromium, url: str, tmp_path: Path) -> None:
    data = encode_clip(np.stack([np.asarray(frame) for frame in frames(SIDE, SIDE, 9)]), fps=FPS)
    ask(page, CHANGING, strength=0.5, fps=FPS)
    page.choose("fields.video", written(tmp_path / "a.mp4", data))
    send(page)
    changed = clip_on_card(page, url)
    assert changed == clip_of(url, [("video", data)], model=CHANGING, strength=0.5, fps=FPS)
    first = page.evaluate("gallery.firstChild.id")
    press(page, "Use as input")
    send(page)
    again = httpx.get(f"{url}/v1/videos/{page.evaluate('gallery.firstChild.id')}", timeout=TIMEOUT_S).json()
    assert (again["remixed_from_video_id"], again["num_frames"]) == (first, 9)
    assert clip_on_card(page, url) == clip_of(url, [("video", changed)], model=CHANGING, strength=0.5, fps=FPS)


def test_pictures_at_frames(page: Chromium, url: str, tmp_path: Path) -> None:
    data = [file_of(picture(SIDE, SIDE, seed)) for seed in (0, 1)]
    ask(page, FILMING, num_frames=17, true_cfg_scale=1)
    page.choose("fields.image", *(written(tmp_path / f"{index}.png", one) for index, one in enumerate(data)))
    page.wait_for(f"fields.width.value === '{SIDE}'")
    fill(page, frame_indices="0, 8")
    send(page)
    files = [("input_reference", (f"{index}.png", one)) for index, one in enumerate(data)]
    asked = {"model": FILMING, "num_frames": 17, "true_cfg_scale": 1}
    assert clip_on_card(page, url) == clip_of(url, files, frame_indices="[0, 8]", **asked)
    assert clip_on_card(page, url) != clip_of(url, files, frame_indices="[0, 16]", **asked)


def test_a_control_picture(page: Chromium, url: str, tmp_path: Path) -> None:
    data = file_of(picture(SIDE, SIDE))
    ask(page, FOLLOWING)
    page.choose("fields.control_image", written(tmp_path / "a.png", data))
    page.wait_for(f"fields.width.value === '{SIDE}'")
    fill(page, control_scale=0.5, control_guidance_end=0.5)
    send(page)
    drawn = page.evaluate("gallery.querySelector('.frame img').src").partition(",")[2]
    for weight in (0.5, 1.0):
        form = {**ASKED, "model": FOLLOWING, "control_scale": weight, "control_guidance_end": 0.5}
        files = {"control_image": ("a.png", data)}
        answer = httpx.post(f"{url}/v1/images/edits", data=form, files=files, timeout=TIMEOUT_S)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert (base64.b64decode(answer.json()["data"][0]["b64_json"]) == base64.b64decode(drawn)) is (weight == 0.5)
