"""Fields of other clients have their effect, and the answer says so."""

from __future__ import annotations

import ast
import re
from typing import Any, get_args

import httpx
import openai
import pytest

from deployments.requests.bodies import EditBody, ImageBody, MediaBody, VideoBody
from deployments.requests.fields import NoEffect
from pipelines.request import MediaRequest
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished, make
from tests.deployments.http.support.events import sse
from tests.deployments.support.fake_service import FakeService
from tests.support.fenced import ROOT

BODIES = [ImageBody, EditBody, VideoBody]
MEANS_THE_DEFAULT = {"seed": -1, "size": ""}
UNFOLDED = {"extra_body"}
"""Fields that are unpacked before the body is read."""
RANDOM = {"request_id", "seed", "waited_s"}


def comparable(request: MediaRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__slots__ if name not in RANDOM}


def effectless(body: type[MediaBody]) -> dict[str, Any]:
    """Return the fields marked as without effect, each with a value."""
    marks = {name: _marks(field.annotation) for name, field in body.model_fields.items()}
    return {name: found[0].example for name, found in marks.items() if found}


def _marks(annotation: Any) -> list[NoEffect]:
    own = [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, NoEffect)]
    return [*own, *(mark for inner in get_args(annotation) for mark in _marks(inner))]


def names_read() -> set[str]:
    """Return the attributes that any reader of a body uses."""
    files = [path for folder in ("requests", "http") for path in (ROOT / "deployments" / folder).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("body", BODIES)
def test_what_nobody_reads_is_marked(body: type[MediaBody]) -> None:
    unread = body.model_fields.keys() - names_read() - UNFOLDED
    assert {"bot_task", "vae_use_tiling"} <= unread <= effectless(body).keys()


@pytest.mark.parametrize("body", BODIES)
def test_what_is_marked_is_said_to_be_without_effect(body: type[MediaBody]) -> None:
    """Switches are in the sentence about them, the rest in the tables or among the returned fields."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "use").glob("*.md")))
    sentence = text[text.index("They are accepted while they are `false`") :].partition("\n\n")[0]
    rows = [line for line in text.splitlines() if "without effect" in line or "given back" in line or "opaque" in line]
    said = {word for part in (sentence, *rows) for word in re.findall(r"`(\w+)`", part)}
    ones = {name for name, value in effectless(body).items() if value == 1}
    assert effectless(body).keys() - ones - said == set()


async def test_what_changes_nothing_is_accepted(client: httpx.AsyncClient, service: FakeService) -> None:
    for body in ({"prompt": "a"}, {"prompt": "a", **MEANS_THE_DEFAULT, **effectless(ImageBody)}):
        answer = await client.post(IMAGES, json=body)
        assert answer.status_code == 200, answer.text
    plain, full = service.performed
    assert comparable(plain) == comparable(full)
    assert full.seed >= 0
    assert answer.json()["safety_identifier"] == "somebody"


@pytest.mark.parametrize("as_form", [False, True], ids=["json", "form"])
async def test_what_changes_nothing_is_accepted_of_clips(
    client: httpx.AsyncClient, service: FakeService, as_form: bool
) -> None:
    full = {"prompt": "a", **MEANS_THE_DEFAULT, **effectless(VideoBody)}
    assert "generate_sound" not in full, "clips may have one"
    form = {name: (None, str(value)) for name, value in full.items()}
    for body in ({"json": {"prompt": "a"}}, {"files": form} if as_form else {"json": full}):
        answer = await client.post("/v1/videos", **body)
        assert answer.status_code == 200, answer.text
        await finished(client, answer.json()["id"])
    plain, other = service.performed
    assert comparable(plain) == comparable(other)


async def test_null_and_empty_form_fields_count_as_absent(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a", "lora": None, "seed": None, "stream": None, "n": None})
    assert answer.status_code == 200, answer.text
    form = {"prompt": "a", "model": "", "seed": "", "seconds": "", "input_reference": "", "num_frames": "", "size": ""}
    for sent in ({"data": form}, {"files": {name: (None, text) for name, text in form.items()}}):
        answer = await client.post("/v1/videos", **sent)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["model"], answer.json()["num_frames"]) == ("fake-clips", 17)


@pytest.mark.parametrize(
    ("fields", "quality", "num_steps"),
    [
        ({}, "medium", 4),
        ({"quality": "auto"}, "medium", 4),
        ({"quality": "standard"}, "medium", 4),
        ({"quality": "low"}, "low", 2),
        ({"quality": "high"}, "high", 6),
        ({"quality": "hd"}, "high", 6),
        ({"quality": "low", "num_inference_steps": 9}, None, 9),
    ],
)
async def test_quality_becomes_steps(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], quality: str | None, num_steps: int
) -> None:
    answer = (await client.post(IMAGES, json={"prompt": "a", **fields})).json()
    assert (answer["quality"], answer["num_inference_steps"]) == (quality, num_steps)
    stream = await client.post(IMAGES, json={"prompt": "a", "stream": True, "partial_images": 1, **fields})
    *previews, (_, last) = sse(stream)
    assert (last["quality"], last["num_inference_steps"]) == (quality or "auto", num_steps)
    assert [data["quality"] for _, data in previews] == [quality or "auto"]
    assert [request.num_inference_steps for request in service.performed] == [num_steps, num_steps]
    clip = await make(client, **fields)
    assert clip["num_inference_steps"] == num_steps


async def test_width_and_height(client: httpx.AsyncClient) -> None:
    for fields in ({"width": 96, "height": 32}, {"width": 96, "height": 32, "size": "96x32"}):
        assert (await client.post(IMAGES, json={"prompt": "a", **fields})).json()["size"] == "96x32"
        assert (await make(client, **fields))["size"] == "96x32"
        form = {"prompt": "a", **{name: str(value) for name, value in fields.items()}}
        assert (await client.post("/v1/videos", data=form)).json()["size"] == "96x32"


@pytest.mark.parametrize(
    ("fields", "true_cfg_scale"),
    [
        ({}, 5.0),
        ({"guidance_scale": 2.5}, 2.5),
        ({"true_cfg_scale": 2.5}, 2.5),
        ({"guidance_scale": 2.5, "true_cfg_scale": 2.5}, 2.5),
        ({"guidance_scale": 0, "true_cfg_scale": 2.5}, 2.5),  # a model's own defaults, sent back
        ({"guidance_scale": 1}, 1.0),
        ({"guidance_scale": 0}, 1.0),
    ],
)
async def test_guidance_of_a_model_without_a_distilled_one(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], true_cfg_scale: float
) -> None:
    await finished(client, (await make(client, **fields))["id"])
    (request,) = service.performed
    assert (request.guidance_scale, request.true_cfg_scale) == (0.0, true_cfg_scale)


@pytest.mark.parametrize("seconds", ["2", 2, 2.0, "2.0", 1.9])
async def test_seconds_as_number_or_text_and_the_real_length_in_the_record(
    client: httpx.AsyncClient, seconds: float | str
) -> None:
    clip = await make(client, seconds=seconds)
    assert (clip["num_frames"], clip["fps"], clip["seconds"]) == (17, 8, "2.125")


def test_old_parameters_of_the_official_client(official: openai.OpenAI) -> None:
    answer = official.images.generate(
        prompt="a", quality="hd", style="natural", background="auto", moderation="auto", user="me", size="auto"
    )
    assert (answer.quality, answer.size) == ("high", "64x64")
