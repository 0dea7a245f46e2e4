"""Control pictures come as files and in JSON, with their weight and steps, for models that follow one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pipelines.request import InputPicture, InputPictures
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.files import data_url, file_of, noise

MODEL, ROUTE = "fake-controlled", "/v1/images/edits"
PICTURE = noise(48, 32)
FILE = file_of(PICTURE)
URL = data_url(FILE)
INPUTS = InputPictures(control=InputPicture.of(PICTURE))


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_control=True, takes_pictures=True)


@pytest.mark.parametrize("value", [URL, {"image_url": URL}], ids=["text", "object"])
async def test_a_control_picture_by_json(client: httpx.AsyncClient, service: FakeService, value: object) -> None:
    """The control picture selects the model that follows one, and gives the size."""
    answer = await client.post(ROUTE, json={"prompt": "a", "control_image": value})
    assert answer.status_code == 200, answer.text
    request = service.performed[-1]
    assert (request.model, request.width, request.height, request.has_control) == (MODEL, 48, 32, True)
    assert (request.control_scale, request.num_pictures) == (None, 0)
    assert service.inputs[-1] == INPUTS


async def test_its_weight_and_steps_in_a_form(client: httpx.AsyncClient, service: FakeService) -> None:
    weights = {"control_scale": "0.5", "control_guidance_start": "0.25", "control_guidance_end": "0.75"}
    files = {"control_image": ("a.png", FILE)}
    answer = await client.post(ROUTE, data={"prompt": "a", "size": "64x64", **weights}, files=files)
    assert answer.status_code == 200, answer.text
    request = service.performed[-1]
    steps = (request.control_guidance_start, request.control_guidance_end)
    assert (request.control_scale, steps, request.width) == (0.5, (0.25, 0.75), 64)
    assert service.inputs[-1] == INPUTS


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no control": (ROUTE, {"model": MODEL}, "control_image", "needs a control picture"),
    "by words": ("/v1/images/generations", {"model": MODEL}, "model", "follows pictures: send them along"),
    "a picture": (ROUTE, {"model": MODEL, "image": URL, "control_image": URL}, "image", "this model takes none"),
    "another model": (
        ROUTE,
        {"model": "fake-edits", "image": URL, "control_image": URL},
        "control_image",
        "this model takes no control picture",
    ),
    "a weight alone": (ROUTE, {"model": "fake-edits", "image": URL, "control_scale": 1}, "control_scale", "takes no"),
    "a weight beyond": (ROUTE, {"control_image": URL, "control_scale": 11}, "control_scale", "from 0 to 10"),
    "steps": (
        ROUTE,
        {"control_image": URL, "control_guidance_start": 0.5, "control_guidance_end": 0.5},
        "control_guidance_start",
        "below control_guidance_end",
    ),
    "steps of another model": (
        ROUTE,
        {"model": "fake-edits", "image": URL, "control_guidance_end": 0.5},
        "control_guidance_start",
        "are not for this model",
    ),
    "two": (ROUTE, {"control_image": [URL, URL]}, "control_image", "it must be a picture"),
    "noise": (ROUTE, {"control_image": data_url(b"noise")}, "control_image", "is no picture that can be read"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_control_picture_that_cannot_be(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    route, fields, param, message = REFUSED[name]
    error = error_of(await client.post(route, json={"prompt": "a", **fields}), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert service.performed == []


async def test_a_model_says_that_it_follows_one(client: httpx.AsyncClient) -> None:
    model = (await client.get(f"/v1/models/{MODEL}")).json()
    assert model["capabilities"] == ["text-to-image", "control"]
    assert model["defaults"]["control_scale"] == 1.0
