"""A client's adapter works on the gang, on the next gang and for Python callers, and is gone once deleted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from safetensors.torch import load_file, save_file

from tests.deployments.support.live import IMAGES, PROMPT, SMALL, TIMEOUT_S, picture, pixels_of, rank_pids
from tests.end_to_end.conftest import CLIPS, PICTURES
from tests.pipelines.lora.support.tiny_lora import write_lora

FILE = "pytorch_lora_weights.safetensors"
INK: dict[str, Any] = {"seed": 1, "lora": [{"name": "ink", "scale": 0.5}]}


@pytest.fixture(scope="module")
def ink(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(models[PICTURES], tmp_path_factory.mktemp("ink") / "ink", seed=1) / FILE


def add(url: str, file: Path, model: str = PICTURES, part: str = "") -> httpx.Response:
    form, files = {"model": model, "name": "ink", "part": part}, {"file": file.read_bytes()}
    return httpx.post(f"{url}/v1/loras", data=form, files=files, timeout=TIMEOUT_S)


def test_files_that_do_not_suit_the_model_change_nothing(
    url: str, ink: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    plain, damaged, other = (
        picture(url, seed=1),
        tmp_path / "damaged",
        write_lora(models[CLIPS], tmp_path / "o", seed=1),
    )
    save_file({name: torch.full_like(x, float("nan")) for name, x in load_file(ink).items()}, damaged)
    (tmp_path / "text").write_text("no tensors")
    problems = {damaged: "not finite", other / FILE: "is for another model", tmp_path / "text": "no safetensors file"}
    for file, problem in problems.items():
        refused = add(url, file)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")
        assert problem in refused.json()["error"]["message"]
    refused = add(url, ink, part="text_encoder")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "part")
    assert add(url, ink, CLIPS).json()["error"]["param"] == "model", "it is served without runtime_loras"
    assert httpx.get(f"{url}/v1/loras").json()["data"] == []
    assert picture(url, seed=1) == plain


async def test_it_is_on_each_gang_until_it_is_deleted(url: str, ink: Path) -> None:
    plain, added = picture(url, seed=1), add(url, ink)
    assert added.status_code == 201, added.text
    expected = picture(url, **INK)
    assert abs(pixels_of(expected).astype(float) - pixels_of(plain)).max() > 9, "the adapter is there"
    handle: Any = serve.get_app_handle("troupe").options(stream=True)
    *_, media = [event async for event in handle.generate.remote(PROMPT, **SMALL, **INK)]
    assert media.data == expected
    os.kill(rank_pids(PICTURES)[1], signal.SIGKILL)
    assert picture(url, **INK) == expected, "a gang that is rebuilt reads it"
    assert httpx.delete(f"{url}/v1/loras/{added.json()['id']}", timeout=TIMEOUT_S).status_code == 204
    gone = httpx.post(f"{url}{IMAGES}", json={"prompt": PROMPT, **SMALL, **INK}, timeout=TIMEOUT_S)
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "lora_not_found")
    assert picture(url, seed=1) == plain
