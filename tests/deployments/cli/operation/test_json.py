"""``--json`` prints the server's answer, and tables show each cell whole at any width of the terminal."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from deployments.cli import operation, show
from deployments.cli.main import app
from deployments.cli.progress import console

CLIP: dict[str, Any] = {
    "id": "video_0123456789abcdef0123456789abcdef0123456789abcdef",
    "model": "wan-shapes",
    "status": "completed",
    "progress": 100,
    "error": None,
    "prompt": "a [red] square",
    "size": "64x64",
    "seconds": "1",
    "created_at": 1_700_000_000,
}
MODEL: dict[str, Any] = {
    "id": "hunyuan-video-1.5-image-to-video",
    "family": "hunyuan_video1_5",
    "kinds": ["image", "video"],
    "defaults": {"width": 1280, "height": 704, "num_inference_steps": 30, "num_frames": 121, "size_multiple": 16},
}
WEIGHTS = "/var/lib/troupe/checkpoints/hunyuan-video-1.5-image-to-video/transformer/diffusion_pytorch_model.safetensors"
HEALTH = {MODEL["id"]: f"its gang is rebuilt [2 of 4] from {WEIGHTS}"}


class StandingServer:
    def __init__(self, url: str, api_key: str) -> None: ...

    def __enter__(self) -> SimpleNamespace:
        return SimpleNamespace(clips=lambda limit: [CLIP][:limit], health=lambda: HEALTH, models=lambda: [MODEL])

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "Client", StandingServer)
    monkeypatch.setattr(show, "Client", StandingServer)


def output_of(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_clips_are_the_servers_own_objects() -> None:
    assert json.loads(output_of("clips", "--url", "http://here", "--json")) == [CLIP]


def test_status_says_null_for_what_is_not_known() -> None:
    state = {"id": MODEL["id"], "kinds": MODEL["kinds"], "gangs": None, "running": None, "waiting": None}
    told = json.loads(output_of("status", "--url", "http://here", "--json", exit_code=1))
    assert told == {"url": "http://here", "ready": False, "models": [state | {"state": HEALTH[MODEL["id"]]}]}


@pytest.mark.torch
def test_models_and_doctor_print_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [model["id"] for model in json.loads(output_of("models", "--json"))][:2] == ["flux-shapes", "wan-shapes"]
    findings = json.loads(output_of("doctor", "--json"))
    assert {"subject", "detail", "ok"} == set(findings[0])
    monkeypatch.setattr(console, "width", 80)
    letters = "".join(re.sub("[│ \n]", "", output_of("doctor")))
    assert [one["detail"] for one in findings if one["detail"].replace(" ", "") not in letters] == []


@pytest.mark.parametrize("width", [40, 80, 120, 400])
@pytest.mark.parametrize(
    ("command", "cells"),
    [
        ("clips", [CLIP["id"], CLIP["model"], "completed", CLIP["size"], "seconds", "22:13", "a [red] square"]),
        ("models", [MODEL["id"], MODEL["family"], "image, video", "1280x704", "steps", "multiple of"]),
        ("status", [MODEL["id"], "image, video", "waiting", "its gang is rebuilt [2 of 4]"]),
    ],
)
def test_no_cell_is_cut(monkeypatch: pytest.MonkeyPatch, command: str, cells: list[str], width: int) -> None:
    """Words stand whole on one line if it has room for them, and none is shortened."""
    monkeypatch.setattr(console, "width", width)
    lines = output_of(command, "--url", "http://here", exit_code=command == "status").splitlines()
    assert max(map(cell_len, lines)) <= max(width, len("No numbers of gangs and jobs: give --metrics-url"))
    text = " ".join(" ".join(lines).split())
    assert [cell for cell in cells if cell not in text and len(cell) < width] == []
    assert "…" not in text
