"""Adapters over HTTP: the field, the name behind a model's, and the list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pipelines.request import Lora
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished
from tests.deployments.support.fake_service import FakeService

WATERCOLOUR, INK = Lora(name="watercolour", scale=0.7), Lora(name="ink")
LORAS = {"fake-pictures": (WATERCOLOUR, INK), "fake-clips": (Lora(name="slow"),)}


@pytest.fixture
def service() -> FakeService:
    return FakeService(loras=LORAS, aliases={"fake-pictures": ("dall-e-3",)})


ASKED: dict[str, tuple[dict[str, Any], tuple[Lora, ...]]] = {
    "none": ({}, ()),
    "null": ({"lora": None}, ()),
    "an empty list": ({"lora": []}, ()),
    "with a scale": ({"lora": [{"name": "ink", "scale": -0.5}]}, (Lora(name="ink", scale=-0.5),)),
    "a whole number": ({"lora": [{"name": "ink", "scale": 2}]}, (Lora(name="ink", scale=2),)),
    "without a scale": ({"lora": [{"name": "watercolour"}]}, (WATERCOLOUR,)),
    "two": (
        {"lora": [{"name": "watercolour", "scale": 0.5}, {"name": "ink"}]},
        (INK, Lora(name="watercolour", scale=0.5)),
    ),
    "behind the model's name": ({"model": "fake-pictures:watercolour"}, (WATERCOLOUR,)),
    "behind an alias": ({"model": "dall-e-3:ink"}, (INK,)),
    "both": (
        {"model": "fake-pictures:ink", "lora": [{"name": "watercolour", "scale": 1.0}]},
        (INK, Lora(name="watercolour")),
    ),
}


@pytest.mark.parametrize("name", ASKED)
async def test_a_request_has_its_adapters(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    fields, loras = ASKED[name]
    answer = await client.post(IMAGES, json={"prompt": "a", **fields})
    assert answer.status_code == 200, answer.text
    assert [(request.model, request.loras) for request in service.performed] == [("fake-pictures", loras)]
    assert {type(lora.scale) for lora in service.performed[0].loras} <= {float}, "1 and 1.0 give the same file"


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": (
        {"lora": [{"name": "oil"}]},
        "lora",
        "fake-pictures is served without an adapter 'oil'; its adapters: watercolour, ink",
    ),
    "unknown behind the name": ({"model": "fake-pictures:oil"}, "model", "its adapters: watercolour, ink"),
    "nothing behind the name": ({"model": "fake-pictures:"}, "model", "its adapters: watercolour, ink"),
    "of another model": ({"lora": [{"name": "slow"}]}, "lora", "its adapters: watercolour, ink"),
    "twice": ({"lora": [{"name": "ink"}, {"name": "ink", "scale": 0.1}]}, "lora", "'ink' is named twice"),
    "twice in two ways": ({"model": "fake-pictures:ink", "lora": [{"name": "ink"}]}, "lora", "'ink' is named twice"),
    "large": ({"lora": [{"name": "ink", "scale": 11}]}, "lora", "it must be from -10 to 10"),
    "of many digits": ({"lora": [{"name": "ink", "scale": -(10**400)}]}, "lora", "it must be from -10 to 10"),
    "a text": ({"lora": [{"name": "ink", "scale": "1"}]}, "lora", "it must be a list such as"),
    "a truth": ({"lora": [{"name": "ink", "scale": True}]}, "lora", "it must be a list such as"),
    "a name alone": ({"lora": "ink"}, "lora", "it must be a list such as"),
    "one alone": ({"lora": {"name": "ink"}}, "lora", "it must be a list such as"),
    "names alone": ({"lora": ["ink"]}, "lora", "it must be a list such as"),
    "another key": ({"lora": [{"name": "ink", "weight": 1}]}, "lora", "it must be a list such as"),
    "no name": ({"lora": [{"scale": 1}]}, "lora", "it must be a list such as"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_adapter_is_told(client: httpx.AsyncClient, service: FakeService, name: str) -> None:
    fields, param, message = WRONG[name]
    answer = await client.post(IMAGES, json={"prompt": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert message in error["message"]
    assert not service.performed


async def test_too_many_adapters_are_told(tmp_path: Path) -> None:
    names = [f"adapter-{number}" for number in range(9)]
    service = FakeService(loras={"fake-pictures": tuple(Lora(name=name) for name in names)})
    async with client_of(build(service, tmp_path)) as client:
        answer = await client.post(IMAGES, json={"prompt": "a", "lora": [{"name": name} for name in names]})
    assert answer.status_code == 400
    assert "at most 8 are allowed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("as_form", [False, True], ids=["json", "form"])
async def test_a_clip_keeps_its_adapters_until_it_is_made(
    client: httpx.AsyncClient, service: FakeService, as_form: bool
) -> None:
    body = {"prompt": "a", "lora": [{"name": "slow", "scale": 0.25}]}
    form = {"files": {name: (None, one if isinstance(one, str) else json.dumps(one)) for name, one in body.items()}}
    answer = await client.post("/v1/videos", **(form if as_form else {"json": body}))
    assert answer.status_code == 200, answer.text
    clip = await finished(client, answer.json()["id"])
    assert clip["model"] == "fake-clips"
    assert [request.loras for request in service.performed] == [(Lora(name="slow", scale=0.25),)]


def test_openai_clients_see_and_name_them(url: str, service: FakeService) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        models = {model.id: model for model in client.models.list()}
        assert list(models) == [
            "fake-pictures", "fake-pictures:watercolour", "fake-pictures:ink", "fake-clips", "fake-clips:slow",
        ]  # fmt: skip
        listed = models["fake-pictures"].model_dump()
        assert listed["loras"] == [{"name": "watercolour", "scale": 0.7}, {"name": "ink", "scale": 1.0}]
        assert (listed["parent"], models["fake-clips:slow"].model_dump()["parent"]) == (None, "fake-clips")
        one = client.models.retrieve("fake-pictures:ink")
        assert one.model_dump() == models["fake-pictures:ink"].model_dump()
        with pytest.raises(openai.NotFoundError, match="its adapters: watercolour, ink"):
            client.models.retrieve("fake-pictures:oil")
        assert client.images.generate(model=one.id, prompt="a", extra_body={"lora": [{"name": "watercolour"}]}).data
        with pytest.raises(openai.BadRequestError, match="its adapters: slow") as caught:
            client.videos.create(model="fake-clips:ink", prompt="a")
        assert caught.value.code == "lora_not_found"
    assert service.performed[0].loras == (INK, WATERCOLOUR)
