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

    def record(
        client: object, prompt: str, out: Path, options: dict[str, Any], images: list[Path], mask: Path | None
    ) -> None:
        files = {"images": images, "mask": mask}
        bodies.append({"prompt": prompt, **options, **{name: value for name, value in files.items() if value}})

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


@pytest.mark.parametrize(("option", "expected"), [("--sound", True), ("--no-sound", False)])
def test_a_clip_with_sound_or_without(monkeypatch: pytest.MonkeyPatch, option: str, expected: bool) -> None:
    assert asked(monkeypatch, option) == {"prompt": "a red circle", "generate_sound": expected}


@pytest.mark.parametrize(("option", "expected"), [("--enhance-prompt", True), ("--no-enhance-prompt", False)])
def test_a_rewritten_prompt_or_not(monkeypatch: pytest.MonkeyPatch, option: str, expected: bool) -> None:
    assert asked(monkeypatch, option) == {"prompt": "a red circle", "enhance_prompt": expected}


def test_a_negative_prompt_and_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--negative-prompt", "blue", "--true-cfg-scale", "3", "--guidance-scale", "2.5", "--size", "64x64")
    assert asked(monkeypatch, *options) == {
        "prompt": "a red circle",
        "negative_prompt": "blue",
        "true_cfg_scale": 3.0,
        "guidance_scale": 2.5,
        "size": "64x64",
    }


def test_pictures_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--image", "a.png", "--image", "b.jpg", "--mask", "c.png", "--strength", "0.5")
    assert asked(monkeypatch, *options) == {
        "prompt": "a red circle",
        "strength": 0.5,
        "images": [Path("a.png"), Path("b.jpg")],
        "mask": Path("c.png"),
    }


def test_adapters_are_those_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--lora", "watercolour", "--lora", "ink:-0.5")
    assert asked(monkeypatch, *options) == {"prompt": "a red circle", "lora": ["watercolour", "ink:-0.5"]}


def test_fewer_forwards_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "--cache", "fast") == {"prompt": "a red circle", "cache": "fast"}


def test_layers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--layers", "3", "--model", "apart", "--steps", "2", "--seed", "1")
    expected = {"layers": 3, "model": "apart", "num_inference_steps": 2, "seed": 1}
    assert asked(monkeypatch, *options) == {"prompt": "a red circle", **expected}


@pytest.mark.parametrize(
    ("kinds", "name", "kind"),
    [
        (["image"], "x.webp", "image"),
        (["video"], "x.mp4", "video"),
        (["video", "image"], "x.mp4", "video"),
        (["video", "image"], "x.PNG", "image"),
    ],
)
def test_the_ending_says_what_is_made(kinds: list[str], name: str, kind: str) -> None:
    assert generate._kind({"id": "m", "kinds": kinds}, Path(name)) == kind


@pytest.mark.parametrize(
    ("kinds", "name", "message"),
    [
        (["image"], "x.mp4", "m makes pictures: --out must end in .png, .jpg, .jpeg, .webp, not .mp4"),
        (["video"], "x.png", "m makes clips: --out must end in .mp4, not .png"),
        (["video", "image"], "x", "m makes clips and pictures: --out must end in .mp4, .png, .* not nothing"),
    ],
)
def test_another_ending_is_refused(kinds: list[str], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate._kind({"id": "m", "kinds": kinds}, Path(name))


class Served:
    def __init__(self, *models: dict[str, Any]) -> None:
        self._models = models

    def models(self) -> list[dict[str, Any]]:
        return [{"kinds": ["image"], "defaults": {}, **model} for model in self._models]


def test_a_model_answers_to_its_other_names() -> None:
    served: Any = Served({"id": "small"}, {"id": "large", "aliases": ["gpt-image-1"]})
    found = [generate._model(served, name, Path("x.png"), 0)["id"] for name in (None, "large", "gpt-image-1")]
    assert found == ["small", "large", "large"]
    with pytest.raises(ValueError, match="no model gpt-image-2; served: small, large"):
        generate._model(served, "gpt-image-2", Path("x.png"), 0)


@pytest.mark.parametrize(
    ("out", "num_pictures", "expected"),
    [
        ("x.mp4", 0, "clips"),
        ("x.mp4", 1, "begun clips"),
        ("x.png", 0, "both"),
        ("x.png", 2, "editor"),
        ("x.gif", 0, "changing"),  # which then says what it makes
    ],
)
def test_without_a_name_it_is_the_first_that_fits(out: str, num_pictures: int, expected: str) -> None:
    served: Any = Served(
        {"id": "changing", "kinds": ["video"], "defaults": {"needs_video": True, "max_video_frames": 81}},
        {"id": "following", "defaults": {"takes_control": True, "needs_control": True}},
        {"id": "clips", "kinds": ["video"]},
        {"id": "begun clips", "kinds": ["video"], "defaults": {"min_pictures": 1, "max_pictures": 1}},
        {"id": "editor", "defaults": {"min_pictures": 1, "max_pictures": 3}},
        {"id": "both", "kinds": ["video", "image"], "defaults": {"min_pictures": 1}, "picture_defaults": {}},
        {"id": "pictures"},
    )
    assert generate._model(served, None, Path(out), num_pictures)["id"] == expected


@pytest.mark.parametrize(
    ("num_pictures", "options", "expected"),
    [
        (1, {}, "one"),
        (2, {}, "many"),
        (1, {"mask": "m.png"}, "masked"),
        (1, {"strength": 0.5}, "over"),
        (1, {"layers": 2}, "apart"),
        (5, {}, "masked"),
    ],
)
def test_pictures_go_to_a_model_that_edits(num_pictures: int, options: dict[str, Any], expected: str) -> None:
    served: Any = Served(
        {"id": "masked", "edits": True, "defaults": {"max_pictures": 4, "takes_mask": True, "needs_mask": True}},
        {"id": "over", "edits": False, "defaults": {"max_pictures": 1, "takes_strength": True}},
        {"id": "apart", "edits": False, "defaults": {"min_pictures": 1, "max_pictures": 1, "max_layers": 4}},
        {"id": "one", "edits": True, "defaults": {"max_pictures": 1}},
        {"id": "many", "edits": True, "defaults": {"min_pictures": 1, "max_pictures": 3, "takes_mask": True}},
    )
    assert generate._model(served, None, Path("x.png"), num_pictures, options)["id"] == expected
