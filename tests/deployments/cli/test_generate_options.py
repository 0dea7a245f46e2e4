"""What ``troupe generate`` asks the server for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import generate, main


def asked(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    bodies: list[dict[str, Any]] = []

    def record(client: object, prompt: str, out: Path, options: dict[str, Any]) -> None:
        bodies.append({"prompt": prompt, **options})

    monkeypatch.setattr(main, "_client", lambda *place: nullcontext())
    monkeypatch.setattr(generate, "generate", record)
    result = CliRunner().invoke(main.app, ["generate", "a red circle", "--out", "x.png", *options])
    assert result.exit_code == 0, result.output
    return bodies[0]


def test_what_is_not_given_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch) == {"prompt": "a red circle"}


def test_a_clip_of_so_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--frames", "9", "--fps", "12", "--n", "1")
    assert asked(monkeypatch, *options) == {"prompt": "a red circle", "num_frames": 9, "fps": 12, "n": 1}


def test_a_negative_prompt_and_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--negative-prompt", "blue", "--true-cfg-scale", "3", "--guidance-scale", "2.5", "--size", "64x64")
    assert asked(monkeypatch, *options) == {
        "prompt": "a red circle",
        "negative_prompt": "blue",
        "true_cfg_scale": 3.0,
        "guidance_scale": 2.5,
        "size": "64x64",
    }
