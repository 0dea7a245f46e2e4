"""The benchmark clients of other servers, by the requests that they send, and clients with a fixed model name.

SGLang 0.5.23, ``multimodal_gen/benchmarks/bench_serving.py``: clips as JSON, polled until ``status`` is completed, and
counted by ``num_outputs`` (pictures by the length of ``data``). vLLM-Omni, ``benchmarks/diffusion/backends.py`` at
commit 0780e453, ``/v1/videos``: an aiohttp form without files, which goes out url-encoded, without a model; polled,
fetched, deleted. Both wait for a 200 of ``/health`` first and warm up with one or two steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from tests.deployments.api.conftest import build, client_of, serving
from tests.deployments.api.routes.test_images import IMAGES
from tests.deployments.api.routes.test_videos import finished
from tests.deployments.support.fake_studio import FakeStudio

PROMPT = "Random prompt 0 for benchmarking diffusion models"


@pytest.mark.parametrize(
    "profile",
    [
        {"num_inference_steps": 1},
        {"size": "64x32", "num_frames": 9, "num_inference_steps": 3, "fps": 4},
        {"seed": 42, "guidance_scale": 5.0, "enable_teacache": False},  # by --extra-body
    ],
)
async def test_clips_of_sglang(client: httpx.AsyncClient, profile: dict[str, Any]) -> None:
    assert (await client.get("/health")).status_code == 200
    await client.get("/v1/model_info")  # whatever is answered, the benchmark goes on
    payload = {"model": "fake-clips", "prompt": PROMPT, "num_outputs_per_prompt": 1, **profile}
    answer = await client.post("/v1/videos", json=payload)
    assert answer.status_code == 200, answer.text
    record = await finished(client, answer.json()["id"])
    assert (record["status"], record["num_outputs"]) == ("completed", 1)


async def test_pictures_of_sglang(client: httpx.AsyncClient) -> None:
    payload = {"model": "fake-pictures", "prompt": PROMPT, "n": 2, "response_format": "b64_json", "size": "64x64"}
    answer = await client.post(IMAGES, json=payload)
    assert len(answer.json()["data"]) == 2


async def test_clips_of_vllm_omni(url: str) -> None:
    """With its own library, whose forms no other one writes in quite the same way."""
    fields = {
        "negative_prompt": "Negative prompt 0 for benchmarking diffusion models",
        "prompt": PROMPT,
        "height": 48,
        "width": 64,
        "num_frames": 1,
        "num_inference_steps": 2,
        "seed": 42,
        "fps": 8,
    }
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, str(value))
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/videos", data=form) as answer:
            assert answer.request_info.headers["Content-Type"] == "application/x-www-form-urlencoded"
            assert answer.status == 200, await answer.text()
            job = await answer.json()
        assert job["status"] == "queued"
        job_url = f"{url}/v1/videos/{job['id']}"
        while job["status"] not in ("completed", "failed"):
            async with session.get(job_url) as poll:
                job = await poll.json()
        assert (job["status"], job["size"], job["num_frames"], job["num_inference_steps"]) == (
            "completed",
            "64x48",
            1,
            2,
        )
        async with session.get(f"{job_url}/content") as content:
            assert (await content.read())[4:8] == b"ftyp"
        async with session.delete(job_url) as deleted:
            assert deleted.status == 200


async def test_pictures_of_vllm_omni(client: httpx.AsyncClient) -> None:
    payload = {"model": "fake-pictures", "prompt": PROMPT, "n": 1, "size": "64x64", "response_format": "b64_json"}
    payload |= {"seed": 42, "num_inference_steps": 2}
    answer = await client.post(IMAGES, json=payload, headers={"Authorization": "Bearer EMPTY"})
    assert answer.status_code == 200, answer.text


ALIASES = {"fake-pictures": ("gpt-image-1", "dall-e-3"), "fake-clips": ("sora-2", "default")}


def test_fixed_names_by_aliases(tmp_path: Path) -> None:
    with (
        serving(build(FakeStudio(aliases=ALIASES), tmp_path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for name in ALIASES["fake-pictures"]:
            assert client.images.generate(model=name, prompt="a").data
        video = client.videos.create(model="sora-2", prompt="a", seconds="4", size="32x32")
        assert video.model == "fake-clips"
        assert client.models.retrieve("dall-e-3").id == "fake-pictures"
        assert [model.id for model in client.models.list()] == ["fake-pictures", "fake-clips"]
        with pytest.raises(openai.BadRequestError, match="makes videos, not images") as caught:
            client.images.generate(model="sora-2", prompt="a")
        assert caught.value.code == "wrong_kind"


async def test_cards_say_what_to_ask_for(client: httpx.AsyncClient, tmp_path: Path) -> None:
    async with client_of(build(FakeStudio(aliases=ALIASES), tmp_path)) as client:
        pictures, clips = (await client.get("/v1/models")).json()["data"]
        assert pictures["aliases"] == ["gpt-image-1", "dall-e-3"]
        assert (pictures["steps"], clips["steps"]) == ({"low": 2, "medium": 4, "high": 6},) * 2
        assert pictures["sizes"][0] == "64x64"
        for size in pictures["sizes"]:
            made = await client.post(IMAGES, json={"prompt": "a", "size": size})
            assert made.json()["size"] == size
