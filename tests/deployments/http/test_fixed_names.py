"""Clients that know only one model's name work, and cards inform others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService

ALIASES = {"fake-pictures": ("gpt-image-1", "dall-e-3"), "fake-clips": ("sora-2", "default")}


def test_fixed_names_by_aliases(tmp_path: Path) -> None:
    with (
        serving(build(FakeService(aliases=ALIASES), tmp_path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for name in ALIASES["fake-pictures"]:
            assert client.images.generate(model=name, prompt="a").data
        video = client.videos.create(model="sora-2", prompt="a", seconds="4", size=cast(Any, "32x32"))
        assert video.model == "fake-clips"
        assert client.models.retrieve("dall-e-3").id == "fake-pictures"
        assert [model.id for model in client.models.list()] == ["fake-pictures", "fake-clips"]
        with pytest.raises(openai.BadRequestError, match="makes videos, not images") as caught:
            client.images.generate(model="sora-2", prompt="a")
        assert caught.value.code == "wrong_kind"


async def test_cards_say_what_to_ask_for(client: httpx.AsyncClient, tmp_path: Path) -> None:
    async with client_of(build(FakeService(aliases=ALIASES), tmp_path)) as client:
        pictures, clips = (await client.get("/v1/models")).json()["data"]
        assert pictures["aliases"] == ["gpt-image-1", "dall-e-3"]
        assert (pictures["steps"], clips["steps"]) == ({"low": 2, "medium": 4, "high": 6},) * 2
        assert pictures["sizes"][0] == "64x64"
        for size in pictures["sizes"]:
            made = await client.post(IMAGES, json={"prompt": "a", "size": size})
            assert made.json()["size"] == size


async def test_slashes_too_many_are_named(client: httpx.AsyncClient) -> None:
    """Base URLs of clients often end in a slash."""
    for path in ("/v1/models/", "/v1/models//", "//v1/models", "/v1//models//"):
        message = error_of(await client.get(f"http://localhost{path}"), 404)["message"]
        assert message == f"There is nothing at '{path}'; did you mean '/v1/models'?"
    assert error_of(await client.get("/nowhere/"), 404)["message"] == "There is nothing at '/nowhere/'"
