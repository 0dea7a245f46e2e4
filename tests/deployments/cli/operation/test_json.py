"""``--json`` prints the server's answer, and tables show ids whole on a narrow terminal."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import operation
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


class StandingServer:
    def __init__(self, url: str, api_key: str) -> None: ...

    def __enter__(self) -> SimpleNamespace:
        return SimpleNamespace(clips=lambda limit: [CLIP][:limit], health=lambda: {"wan-shapes": "ready"}, models=list)

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "Client", StandingServer)
    monkeypatch.setattr(operation, "Client", StandingServer)
    monkeypatch.setattr(console, "width", 60)


def output_of(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_clips_are_the_servers_own_objects() -> None:
    assert json.loads(output_of("clips", "--url", "http://here", "--json")) == [CLIP]


def test_status_says_null_for_what_is_not_known() -> None:
    state = {"id": "wan-shapes", "kinds": None, "gangs": None, "running": None, "waiting": None, "state": "ready"}
    told = json.loads(output_of("status", "--url", "http://here", "--json"))
    assert told == {"url": "http://here", "ready": True, "models": [state]}


@pytest.mark.torch
def test_models_and_doctor_print_one_document() -> None:
    assert [model["id"] for model in json.loads(output_of("models", "--json"))][:2] == ["flux-shapes", "wan-shapes"]
    assert {"subject", "detail", "ok"} == set(json.loads(output_of("doctor", "--json"))[0])


def test_ids_are_never_cut() -> None:
    assert CLIP["id"] in output_of("clips", "--url", "http://here")
