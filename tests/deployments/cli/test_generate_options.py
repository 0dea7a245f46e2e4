"""``troupe generate`` sends the right request to the server."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import generate, main
from deployments.http.answers import Model
from deployments.requests.model_choice import Needs
from deployments.service.interface import ModelCard
from pipelines.defaults import Defaults
from tests.deployments.support.fake_service import (
    BEGUN_CLIPS,
    BOTH,
    CHANGED_CLIPS,
    CLIPS,
    CONTROLLED,
    EDITS,
    PICTURES,
    REFERRED_CLIPS,
)


def body_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    bodies: list[dict[str, Any]] = []

    def record(client: object, prompt: str, out: Path, options: dict[str, Any], inputs: generate.Inputs) -> None:
        files = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        bodies.append({"prompt": prompt, **options, **{name: value for name, value in files.items() if value}})

    monkeypatch.setattr(main, "_client", lambda *place: nullcontext())
    monkeypatch.setattr(generate, "generate", record)
    result = CliRunner().invoke(main.app, ["generate", "a red circle", "--out", "x.png", *options])
    assert result.exit_code == 0, result.output
    return bodies[0]


def test_what_is_not_given_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert body_of(monkeypatch) == {"prompt": "a red circle"}


def test_a_clip_of_so_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--frames", "9", "--fps", "12", "--n", "1")
    assert body_of(monkeypatch, *options) == {"prompt": "a red circle", "num_frames": 9, "fps": 12, "n": 1}


@pytest.mark.parametrize(("option", "expected"), [("--sound", True), ("--no-sound", False)])
def test_a_clip_with_sound_or_without(monkeypatch: pytest.MonkeyPatch, option: str, expected: bool) -> None:
    assert body_of(monkeypatch, option) == {"prompt": "a red circle", "generate_sound": expected}


@pytest.mark.parametrize(("option", "expected"), [("--enhance-prompt", True), ("--no-enhance-prompt", False)])
def test_a_rewritten_prompt_or_not(monkeypatch: pytest.MonkeyPatch, option: str, expected: bool) -> None:
    assert body_of(monkeypatch, option) == {"prompt": "a red circle", "enhance_prompt": expected}


def test_a_negative_prompt_and_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--negative-prompt", "blue", "--true-cfg-scale", "3", "--guidance-scale", "2.5", "--size", "64x64")
    assert body_of(monkeypatch, *options) == {
        "prompt": "a red circle",
        "negative_prompt": "blue",
        "true_cfg_scale": 3.0,
        "guidance_scale": 2.5,
        "size": "64x64",
    }


def test_pictures_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--image", "a.png", "--image", "b.jpg", "--mask", "c.png", "--strength", "0.5")
    assert body_of(monkeypatch, *options) == {
        "prompt": "a red circle",
        "strength": 0.5,
        "images": [Path("a.png"), Path("b.jpg")],
        "mask": Path("c.png"),
    }


def test_a_control_and_a_clip_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = ("--video", "b.mp4", "--video", "c.mp4", "--keep-audio")
    options = ("--control-image", "a.png", "--control-scale", "0.7", *clips)
    expected = {"control_image": Path("a.png"), "control_scale": 0.7, "videos": [Path("b.mp4"), Path("c.mp4")]}
    expected["keep_audio"] = True
    assert body_of(monkeypatch, *options) == {"prompt": "a red circle", **expected}


def test_adapters_are_those_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--lora", "watercolour", "--lora", "ink:-0.5")
    assert body_of(monkeypatch, *options) == {"prompt": "a red circle", "lora": ["watercolour", "ink:-0.5"]}


def test_fewer_forwards_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert body_of(monkeypatch, "--cache", "fast") == {"prompt": "a red circle", "cache": "fast"}


def test_layers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--layers", "3", "--model", "apart", "--steps", "2", "--seed", "1")
    expected = {"layers": 3, "model": "apart", "num_inference_steps": 2, "seed": 1}
    assert body_of(monkeypatch, *options) == {"prompt": "a red circle", **expected}


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
        (["video", "image"], "x", "--out is x: it must end in .mp4, .png, .* not nothing"),
    ],
)
def test_another_ending_is_refused(kinds: list[str], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate._kind({"id": "m", "kinds": kinds}, Path(name))


class Served:
    def __init__(self, **models: Defaults) -> None:
        aliases = {"large": ("gpt-image-1",)}
        self._cards = [
            ModelCard(name=name, family="f", created=0, defaults=one, aliases=aliases.get(name, ()))
            for name, one in models.items()
        ]

    def models(self) -> list[dict[str, Any]]:
        return [Model.of(card).model_dump(mode="json") for card in self._cards]


def test_a_model_answers_to_its_other_names() -> None:
    served: Any = Served(small=PICTURES, large=PICTURES)
    found = [generate._model(served, name, Path("x.png"), Needs())["id"] for name in (None, "large", "gpt-image-1")]
    assert found == ["small", "large", "large"]
    with pytest.raises(ValueError, match="no model gpt-image-2; served: small, large"):
        generate._model(served, "gpt-image-2", Path("x.png"), Needs())


@pytest.mark.parametrize(
    ("out", "needs", "expected"),
    [
        ("x.mp4", Needs(), "clips"),
        ("x.mp4", Needs(num_pictures=1), "begun_clips"),
        ("x.mp4", Needs(has_video=True), "changing"),
        ("x.mp4", Needs(has_video=True, keeps_audio=True), "changing"),
        ("x.mp4", Needs(has_video=True, num_videos=2), "referring"),
        ("x.png", Needs(), "pictures"),
        ("x.png", Needs(num_pictures=1), "editor"),
        ("x.png", Needs(has_control=True), "following"),
        ("x.gif", Needs(), "changing"),  # its error names what it makes
    ],
)
def test_without_a_name_it_is_what_the_server_takes(out: str, needs: Needs, expected: str) -> None:
    served: Any = Served(
        changing=CHANGED_CLIPS,
        referring=replace(REFERRED_CLIPS, max_videos=3, max_pictures=0),
        following=CONTROLLED,
        clips=CLIPS,
        begun_clips=BEGUN_CLIPS,
        editor=EDITS,
        pictures=PICTURES,
        both=BOTH,
    )
    assert generate._model(served, None, Path(out), needs)["id"] == expected


def test_files_have_the_names_of_the_form(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.bin" for name in ("image", "mask", "control_image", "video")}
    for name, path in paths.items():
        path.write_bytes(name.encode())
    image, *others = paths.items()
    inputs = generate.Inputs(images=(image[1],), videos=(paths["video"],), **dict(others[:-1]))
    assert inputs.read() == [(name, (f"{name}.bin", name.encode())) for name in paths]
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        generate.Inputs(images=(tmp_path / "gone.png",)).read()
