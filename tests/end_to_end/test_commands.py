"""Commands talk to a running application."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.deployments.support.commands import assert_one_line, troupe
from tests.end_to_end.conftest import CLIPS, EDITS, PICTURES, RECIPE


def test_a_picture(url: str, tmp_path: Path) -> None:
    made = []
    for name in ("one.png", "deeper/same.png"):
        out = tmp_path / name
        size = ("--size", "64x48", "--steps", "4", "--seed", "7")
        result = troupe("generate", "a red circle", *size, "--out", str(out), "--url", url)
        assert result.exit_code == 0, result.output
        assert f"{out}  seed 7" in result.output
        assert "step 4 of 4" in result.output
        for stage in ("queue", "encode", "denoise", "decode"):
            assert stage in result.output
        made.append(out.read_bytes())
    assert made[0] == made[1]
    picture = Image.open(io.BytesIO(made[0]))
    assert (picture.format, picture.size) == ("PNG", (64, 48))


def test_models(url: str) -> None:
    result = troupe("models", "--url", url)
    assert result.exit_code == 0, result.output
    for cell in (PICTURES, CLIPS, EDITS, "image", "video", "128x128", "96x96"):
        assert cell in result.output


MISTAKES = {
    "size": (["--size", "63x64", "--out", "a.png"], "size is 63x64: width and height must be positive multiples"),
    "steps": (["--steps", "0", "--out", "a.png"], "num_inference_steps is 0"),
    "model": (
        ["--model", "dall-e", "--out", "a.png"],
        f"no model dall-e; served: {PICTURES}, {RECIPE}, {CLIPS}, {EDITS}",
    ),
    "ending": (["--out", "a.gif"], "--out is a.gif: it must end in .mp4, .png, .jpg, .jpeg, .webp, not .gif"),
    "picture": (["--model", PICTURES, "--out", "a.mp4"], f"{PICTURES} makes pictures: --out must end in .png"),
    "clip": (["--model", CLIPS, "--out", "a.png"], f"{CLIPS} makes clips: --out must end in .mp4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(url: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args, told = MISTAKES[name]
    assert_one_line(troupe("generate", "a red circle", *args, "--url", url), told)
    assert not list(tmp_path.iterdir())
