"""Input pictures, sent by the official client or as JSON, reach the service."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from pipelines.request import InputPicture, InputPictures
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.support.events import sse
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService, colour
from tests.deployments.support.files import data_url, file_of, noise

EDITS = "/v1/images/edits"
FIRST, SECOND = noise(48, 32, seed=1), noise(16, 16, seed=2)
FILES = file_of(FIRST), file_of(SECOND, "webp", lossless=True)
HOLE = FIRST.convert("RGBA")
HOLE.paste((0, 0, 0, 0), (0, 0, 24, 32))
MASK = file_of(HOLE)
PAINTED = np.zeros((32, 48), np.uint8)
PAINTED[:, :24] = 255
URLS = [data_url(one) for one in FILES]


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_pictures=True)


def inputs_of(service: FakeService) -> InputPictures:
    return service.inputs[-1]


BOTH = InputPictures(pictures=(InputPicture.of(FIRST), InputPicture.of(SECOND)))
ONE = InputPictures(pictures=BOTH.pictures[:1])
WITH_MASK = InputPictures(pictures=ONE.pictures, mask=InputPicture.of(Image.fromarray(PAINTED)))


async def test_a_colour_lies_beneath_a_transparent_picture(client: httpx.AsyncClient, service: FakeService) -> None:
    clear = noise(48, 32, "RGBA")
    fields = {"prompt": "a", "model": "fake-edits", "background": "navy"}
    answer = await client.post(EDITS, data=fields, files={"image": ("a.png", file_of(clear), "image/png")})
    assert answer.status_code == 200, answer.text
    expected = Image.alpha_composite(Image.new("RGBA", clear.size, "navy"), clear).convert("RGB")
    assert inputs_of(service).pictures == (InputPicture.of(expected),)


def test_a_picture_of_the_official_client(official: openai.OpenAI, service: FakeService) -> None:
    answer = official.images.edit(
        image=("whatever.txt", FILES[0], "text/plain"),
        prompt="a",
        model="fake-edits",
        n=2,
        quality="high",
        output_format="webp",
        output_compression=90,
        input_fidelity="high",
        background="auto",
        user="me",
        extra_body={"seed": 300, "strength": 0.25},
    )
    assert (answer.size, answer.output_format, answer.quality) == ("48x32", "webp", "high")
    pictures: Any = answer.data
    assert [one.seed for one in pictures] == [300, 301]
    image = Image.open(io.BytesIO(base64.b64decode(pictures[0].b64_json)))
    assert (image.format, image.size) == ("WEBP", (48, 32))
    assert service.inputs == [ONE, ONE]
    request = service.performed[0]
    assert (request.num_pictures, request.has_mask, request.strength) == (1, False, 0.25)


def test_several_pictures_and_a_mask(official: openai.OpenAI, service: FakeService) -> None:
    official.images.edit(image=[io.BytesIO(one) for one in FILES], prompt="a", size="64x64")
    assert inputs_of(service) == BOTH
    assert (service.performed[0].model, service.performed[0].width) == ("fake-edits", 64)
    official.images.edit(image=FILES[0], mask=MASK, prompt="a", response_format="url")
    assert inputs_of(service) == WITH_MASK
    assert (service.performed[1].num_pictures, service.performed[1].has_mask) == (1, True)


def test_a_stream_of_the_official_client(official: openai.OpenAI) -> None:
    extra = {"seed": 7, "stream_progress": True}
    stream = official.images.edit(image=FILES[0], prompt="a", stream=True, partial_images=2, extra_body=extra)
    events: list[Any] = list(stream)
    types = [event.type for event in events]
    assert types.count("troupe.progress") == 4
    assert types.count("image_edit.partial_image") == 2
    assert types[-1] == "image_edit.completed"
    completed = Image.open(io.BytesIO(base64.b64decode(events[-1].b64_json)))
    assert completed.getpixel((5, 5)) == colour(7)
    assert events[-1].usage.total_tokens == 0


JSON_BODIES = {
    "as OpenAI has it": ({"images": [{"image_url": url} for url in URLS]}, BOTH),
    "texts": ({"images": URLS}, BOTH),
    "by its name in forms": ({"image": URLS}, BOTH),
    "one": ({"image": URLS[0]}, ONE),
    "with a mask": ({"images": [{"image_url": URLS[0]}], "mask": {"image_url": data_url(MASK)}}, WITH_MASK),
    "nulls": ({"image": URLS[0], "images": None, "mask": None, "strength": None, "input_fidelity": None}, ONE),
}


@pytest.mark.parametrize(("fields", "inputs"), JSON_BODIES.values(), ids=JSON_BODIES.keys())
async def test_json(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], inputs: InputPictures
) -> None:
    answer = await client.post(EDITS, json={"prompt": "a", **fields})
    assert answer.status_code == 200, answer.text
    assert service.inputs == [inputs]


async def test_a_form_of_any_client(client: httpx.AsyncClient, service: FakeService) -> None:
    """The forms have curl's repeated fields, a browser's field without a file, pictures as text, or no files."""
    repeated = [("image", ("a.png", FILES[0])), ("image", ("b", FILES[1])), ("mask", ("", b""))]
    indexed = [("image[0]", ("a.png", FILES[0])), ("image[1]", (None, URLS[1]))]
    forms: list[dict[str, Any]] = [{"files": repeated}, {"files": indexed}, {"data": {"image[]": URLS}}]
    for sent in forms:
        fields = {"prompt": "a", "strength": "1", "mask": "", **sent.get("data", {})}
        answer = await client.post(EDITS, data=fields, files=sent.get("files"))
        assert answer.status_code == 200, answer.text
        assert (inputs_of(service), service.performed[-1].strength) == (BOTH, 1.0)


BAD = {
    "no picture": ({"model": "fake-edits"}, 400, "image", "0 input pictures were sent; this model takes from 1 to 3"),
    "none for a model without": ({}, 400, "image", "image is required"),
    "words alone": ({"model": "fake-pictures", "image": URLS[0]}, 400, "image", "this model takes none"),
    "a mask for a model without": ({"model": "fake-pictures", "mask": URLS[0]}, 400, "mask", "takes no mask"),
    "too many": ({"image": [URLS[0]] * 4}, 400, "image", "4 input pictures were sent; this model takes from 1 to 3"),
    "elsewhere": ({"image": "https://a.example/b.png"}, 400, "image", "pictures are not fetched from elsewhere"),
    "an uploaded file": ({"images": [{"file_id": "file-1"}]}, 400, "images", "it must be a picture"),
    "a number": (
        {"image": 5},
        400,
        "image",
        'image is 5: it must be a picture: a file, a data URL, or {"image_url": a',
    ),
    "two masks": ({"image": URLS[0], "mask": URLS}, 400, "mask", "it must be a picture"),
    "another size": ({"image": URLS[1], "mask": data_url(MASK)}, 400, "mask", "mask has 48x32 pixels"),
    "strength": ({"image": URLS[0], "strength": 0}, 400, "strength", "strength is 0.0; it must be above 0"),
    "more strength": ({"image": URLS[0], "strength": 1.1}, 400, "strength", "it must be above 0 and at most 1"),
    "strength as text": ({"image": URLS[0], "strength": "1"}, 400, "strength", "it must be a number"),
    "fidelity": ({"image": URLS[0], "input_fidelity": "full"}, 400, "input_fidelity", "it must be high or low"),
    "broken": ({"image": data_url(FILES[0][:1000])}, 400, "image", "image is broken"),
    "large": ({"image": data_url(bytes(9001))}, 413, "image", "image has 9001 bytes; a picture may have 9000 at most"),
    "many pixels": ({"image": data_url(file_of(Image.new("1", (300, 300))))}, 413, "image", "may have 50000 together"),
    "a clip's model": ({"model": "fake-begun-clips", "image": URLS[0]}, 400, "model", "makes videos, not images"),
    "a clip's field": ({"input_reference": URLS[0]}, 400, "input_reference", "Unknown field 'input_reference'"),
}


@pytest.mark.parametrize(("fields", "status", "param", "message"), BAD.values(), ids=BAD.keys())
async def test_what_is_wrong_is_told(
    service: FakeService, tmp_path: Path, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    limits: dict[str, Any] = {"max_picture_bytes": 9000, "max_picture_pixels": 50_000}
    async with client_of(build(service, tmp_path, **limits)) as client:
        error = error_of(await client.post(EDITS, json={"prompt": "a", **fields}), status)
    assert error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 1000, "the message omits the body"
    assert service.performed == []


async def test_a_model_that_needs_a_picture_says_where(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post("/v1/images/generations", json={"prompt": "a", "model": "fake-edits"})
    error = error_of(answer, 400)
    assert (error["param"], "to POST /v1/images/edits" in error["message"]) == ("model", True)
    assert (await client.post("/v1/images/generations", json={"prompt": "a"})).status_code == 200


async def test_models_say_what_they_take(client: httpx.AsyncClient) -> None:
    models = {one["id"]: one["defaults"] for one in (await client.get("/v1/models")).json()["data"]}
    names = ("min_pictures", "max_pictures", "takes_mask", "takes_strength")
    assert [models["fake-edits"][name] for name in names] == [1, 3, True, True]
    assert [models["fake-pictures"][name] for name in names] == [0, 0, False, False]


async def test_the_stream_of_json_and_no_event_of_drawing(client: httpx.AsyncClient) -> None:
    answer = await client.post(EDITS, json={"prompt": "a", "image": URLS[0], "stream": True, "partial_images": 1})
    assert [name for name, _ in sse(answer)] == ["image_edit.partial_image", "image_edit.completed"]


async def test_a_key_and_the_own_page_are_asked_for(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=("alpha",))) as client:
        files = {"image": FILES[0]}
        assert error_of(await client.post(EDITS, data={"prompt": "a"}, files=files), 401)["code"] == "missing_api_key"
        headers = {"Authorization": "Bearer alpha"}
        assert (await client.post(EDITS, data={"prompt": "a"}, files=files, headers=headers)).status_code == 200
        headers["Origin"] = "https://evil.example"
        error = error_of(await client.post(EDITS, data={"prompt": "a"}, files=files, headers=headers), 403)
        assert error["code"] == "origin_not_allowed"
