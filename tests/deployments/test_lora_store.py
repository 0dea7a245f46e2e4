"""Clients add adapters to a whole application: on its gangs, over a gang's death, and over a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from safetensors.torch import load_file, save_file

from deployments.config import ServeConfig
from tests.deployments.support.live import IMAGES, PROMPT, SMALL, TIMEOUT_S, config_of, live, picture, rank_pids
from tests.pipelines.lora.support.tiny_lora import write_lora

pytestmark = pytest.mark.slow  # each part of them has a quick test
FILE = "pytorch_lora_weights.safetensors"
Start = Callable[[], AbstractContextManager[str]]


@pytest.fixture(scope="module")
def ink(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file that needs no config beside it."""
    return write_lora(pictures, tmp_path_factory.mktemp("ink") / "ink", seed=1) / FILE


@pytest.fixture
def start(ray_cluster: None, pictures: Path, ink: Path, tmp_path: Path) -> Start:
    """Start the application, which has the same adapter in its configuration as ``fixed``."""
    api = {"data_dir": str(tmp_path / "data"), "metadata": "none"}
    document = config_of({"pictures": pictures}, api=api).model_dump(mode="json")
    (model,) = document["applications"][0]["args"]["models"]
    model["loras"] = [{"name": "fixed", "path": str(ink), "scale": 0.8}]
    model["runtime_loras"] = {"max_loaded": 2}
    return partial(live, ServeConfig.model_validate(document))


def add(url: str, file: Path, name: str) -> httpx.Response:
    form = {"model": "pictures", "name": name, "scale": "0.8"}
    return httpx.post(f"{url}/v1/loras", data=form, files={"file": file.read_bytes()}, timeout=TIMEOUT_S)


def with_lora(url: str, name: str) -> bytes:
    return picture(url, seed=1, lora=[{"name": name}])


async def by_handle(name: str) -> bytes:
    handle: Any = serve.get_app_handle("troupe").options(stream=True)
    *_, media = [event async for event in handle.generate.remote(PROMPT, **SMALL, seed=1, lora=[{"name": name}])]
    return bytes(media.data)


def test_pictures_are_those_of_the_configured_adapter(start: Start, ink: Path, clips: Path, tmp_path: Path) -> None:
    damaged, other = tmp_path / "damaged.safetensors", write_lora(clips, tmp_path / "other", seed=1) / FILE
    tensors = load_file(ink)
    save_file({name: torch.full_like(x, float("nan")) for name, x in tensors.items()}, damaged)
    (tmp_path / "text").write_text("no tensors")
    with start() as url:
        plain, expected = picture(url, seed=1), with_lora(url, "fixed")
        assert plain != expected
        for file, message in (
            (damaged, "not finite"),
            (other, "is for another model"),
            (tmp_path / "text", "no safetensors file"),
        ):
            refused = add(url, file, "came")
            assert refused.status_code == 400, refused.text
            assert message in refused.json()["error"]["message"]
            assert str(tmp_path) not in refused.text
        assert httpx.get(f"{url}/v1/loras").json()["data"] == []
        assert list((tmp_path / "data" / "loras").iterdir()) == []
        answer = add(url, ink, "came")
        assert answer.status_code == 201, answer.text
        assert with_lora(url, "came") == expected
        assert picture(url, seed=1) == plain
        assert asyncio.run(by_handle("came")) == expected
        os.kill(rank_pids("pictures")[1], signal.SIGKILL)
        assert with_lora(url, "came") == expected, "a gang that is rebuilt reads it"
        assert httpx.delete(f"{url}/v1/loras/{answer.json()['id']}").status_code == 204
        body = {"prompt": PROMPT, **SMALL, "lora": [{"name": "came"}]}
        gone = httpx.post(f"{url}{IMAGES}", json=body, timeout=TIMEOUT_S)
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "lora_not_found")
        assert picture(url, seed=1) == plain


def test_it_is_there_after_a_restart(start: Start, ink: Path) -> None:
    with start() as url:
        assert add(url, ink, "came").status_code == 201
        expected = with_lora(url, "came")
    with start() as url:
        assert [one["name"] for one in httpx.get(f"{url}/v1/loras").json()["data"]] == ["came"]
        assert with_lora(url, "came") == expected
