"""A picture split into layers is several files of one job, in answers, streams and on disk."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from deployments.cli.client import Client
from deployments.cli.generate import Inputs, generate
from deployments.requests.handle import handle_request
from deployments.requests.request_errors import RequestError
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService, colour
from tests.deployments.support.files import data_url, file_of, noise

EDITS = "/v1/images/edits"
FILE = file_of(noise(30, 20, seed=1))
BODY = {"model": "fake-layers", "image": data_url(FILE), "seed": 7}


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_pictures=True, takes_apart=True)


def opacity(data: bytes) -> int:
    """Return the opacity of the whole picture, whose colour is its seed's."""
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    assert image.size == (80, 48), "a small picture was not brought to the size of the model"
    pixel: Any = image.getpixel((5, 5))
    (red, green, blue, opacity) = pixel
    assert (red, green, blue) == colour(7)
    return int(opacity)


def test_the_official_client_gets_every_layer(url: str, service: FakeService) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official:
        extra = {"layers": 3, "seed": 7}
        answer: Any = official.images.edit(model="fake-layers", image=FILE, prompt="a", n=1, extra_body=extra)
    assert [opacity(base64.b64decode(one.b64_json)) for one in answer.data] == [255, 254, 253]
    assert [(one.seed, one.layer) for one in answer.data] == [(7, 0), (7, 1), (7, 2)]
    assert (answer.background, answer.output_format, answer.size) == ("transparent", "png", "80x48")
    assert service.performed[0].num_layers == 3


async def test_several_pictures_have_layers_each(client: httpx.AsyncClient, service: FakeService) -> None:
    """The request wants URLs and WebP, and has no prompt and the model's own number of layers."""
    fields = {"n": 2, "response_format": "url", "output_format": "webp"}
    answer = await client.post(EDITS, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(one["seed"], one["layer"]) for one in data] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert len({one["url"] for one in data}) == 4
    file = await client.get(data[1]["url"])
    assert (file.headers["content-type"], opacity(file.content)) == ("image/webp", 254)
    assert [(one.prompt, one.num_layers) for one in service.performed] == [("", 2), ("", 2)]


async def test_a_stream_has_an_event_for_each_layer(client: httpx.AsyncClient) -> None:
    fields = {"prompt": "a", "stream": True, "stream_progress": True, "partial_images": 1}
    answer = await client.post(EDITS, json={**BODY, **fields})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines]
    types = [event["type"] for event in events]
    assert types.count("troupe.progress") == 4
    assert types.count("image_edit.partial_image") == 1
    completed = [event for event in events if event["type"] == "image_edit.completed"]
    assert [(one["image_index"], one["layer"], one["background"]) for one in completed] == [
        (0, 0, "transparent"),
        (0, 1, "transparent"),
    ]
    assert [opacity(base64.b64decode(one["b64_json"])) for one in completed] == [255, 254]


async def test_other_pictures_have_no_layers(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(EDITS, json={"prompt": "a", "model": "fake-edits", "image": data_url(FILE)})
    assert (answer.json()["data"][0]["layer"], answer.json()["background"]) == (None, "opaque")
    assert service.performed[0].num_layers == 0


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({"layers": 0}, "layers", "layers is 0; it must be from 1 to 5"),
    "too many": ({"layers": 6}, "layers", "layers is 6; it must be from 1 to 5"),
    "as text": ({"layers": "3"}, "layers", "it must be a whole number"),
    "of a model without": (
        {"layers": 2, "model": "fake-edits", "prompt": "a"},
        "layers",
        "layers is 2; this model makes whole pictures: leave it out",
    ),
    "jpeg": ({"output_format": "jpeg"}, "output_format", "which knows no transparency"),
    "opaque": ({"background": "opaque"}, "background", "layers are transparent"),
    "no words for a model that needs some": ({"model": "fake-edits"}, "prompt", "prompt is required"),
    "spaces for a model that needs words": (
        {"model": "fake-edits", "prompt": " "},
        "prompt",
        "prompt is ' ': it must hold more than spaces",
    ),
}


@pytest.mark.parametrize(("fields", "param", "message"), BAD.values(), ids=BAD.keys())
async def test_what_is_wrong_is_told(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(await client.post(EDITS, json={**BODY, **fields}), 400)
    assert (error["param"], message in error["message"]) == (param, True), error
    assert service.performed == []


async def test_who_draws_without_pictures_knows_no_layers(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/images/generations", json={"prompt": "a", "layers": 2})
    assert error_of(answer, 400)["code"] == "unknown_field"


@pytest.mark.parametrize(("options", "num_files"), [({}, 2), ({"layers": 3, "n": 2}, 6), ({"layers": 1}, 1)])
def test_the_command_writes_every_layer(url: str, tmp_path: Path, options: dict[str, int], num_files: int) -> None:
    (tmp_path / "in.png").write_bytes(FILE)
    with Client(url) as client:
        fields = {"model": "fake-layers", "seed": 7, **options}
        generate(client, "", tmp_path / "out" / "picture.png", fields, Inputs(images=[tmp_path / "in.png"]))
    names = [f"picture-{number}.png" for number in range(1, num_files + 1)] if num_files > 1 else ["picture.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert opacity((tmp_path / "out" / names[0]).read_bytes()) == 255


def test_handles_take_the_same_fields(service: FakeService) -> None:
    request, output, _ = handle_request(service.cards(), "id", {**BODY, "prompt": "", "layers": 3})
    assert (request.num_layers, output.format) == (3, "png")
    with pytest.raises(RequestError, match="layers is 9"):
        handle_request(service.cards(), "id", {**BODY, "prompt": "", "layers": 9})
