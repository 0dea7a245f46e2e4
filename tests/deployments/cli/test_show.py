"""``troupe show`` reads files of the application and of other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from deployments.requests.handle import handle_request
from deployments.service.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.media.encode import encode_frames
from pipelines.media.metadata import MetadataWriter
from pipelines.media.provenance import Credentials, ManifestWriter
from pipelines.request import Lora, MediaRequest
from tests.deployments.support.commands import assert_one_line, troupe
from tests.deployments.support.fake_service import CLIPS, PICTURES
from tests.support.certificates import Authority

FORMATS = ("png", "jpeg", "webp", "mp4")
FRAMES = np.zeros((1, 32, 48, 3), np.uint8)
OF_ANOTHER = "a cat, \x1b[31mred\nNegative prompt: dog\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 32x32"

OWN: dict[str, Any] = {"request_id": "", "waited_s": 0.0}
"""Fields that differ between any two requests."""


def cards(defaults: Defaults) -> dict[str, ModelCard]:
    card = ModelCard(name="m", family="f", created=0, defaults=defaults, loras=(Lora(name="ink", scale=0.5),))
    return {"m": card}


def request_of(defaults: Defaults, **fields: Any) -> MediaRequest:
    return handle_request(cards(defaults), "id", fields)[0]


def written(folder: Path, format: str, request: MediaRequest) -> Path:
    texts = MetadataWriter(level="full", software="Troupe 1.2.3", sampler="Euler").texts(request)
    file = folder / f"file.{format}"
    file.write_bytes(encode_frames(FRAMES, format, fps=8, texts=texts))  # type: ignore[arg-type]
    return file


def document(*files: Path) -> list[Mapping[str, Any]]:
    result = troupe("show", "--json", *map(str, files))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("format", FORMATS)
def test_the_fields_of_a_file_ask_for_the_same_again(tmp_path: Path, format: str) -> None:
    """The fields in a file, sent to the API, give the request it was made from."""
    defaults = CLIPS if format == "mp4" else PICTURES
    fields = {"prompt": 'a circle: red,\n"round" 猫', "negative_prompt": "", "true_cfg_scale": 2.5, "seed": 2**53 - 1}
    request = request_of(defaults, **fields, lora=[{"name": "ink"}], size="32x32", num_inference_steps=7)
    (shown,) = document(written(tmp_path, format, request))
    said = dict(shown["settings"])
    assert (said.pop("software"), said.pop("sampler")) == ("Troupe 1.2.3", "Euler")
    again = request_of(defaults, **said)
    assert replace(again, **OWN) == replace(request, **OWN)


@pytest.mark.parametrize("format", FORMATS)
def test_a_line_for_each_field(tmp_path: Path, format: str) -> None:
    defaults = CLIPS if format == "mp4" else PICTURES
    file = written(tmp_path, format, request_of(defaults, prompt="a\nb", seed=7, size="32x32", num_inference_steps=7))
    lines = troupe("show", str(file)).stdout.splitlines()
    assert lines[0] == f"{file}: made by Troupe 1.2.3"
    assert {"  model: m", "  prompt: a", "    b", "  seed: 7", "  size: 32x32"} < set(lines)


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_the_text_of_another_program_is_shown_as_it_is(tmp_path: Path, format: str, order: str) -> None:
    """AUTOMATIC1111 writes one byte order, and some programs the other."""
    file, image = tmp_path / f"file.{format}", Image.fromarray(FRAMES[0])
    if format == "png":
        info = PngInfo()
        info.add_text("parameters", OF_ANOTHER)
        image.save(file, pnginfo=info)
    else:
        exif = Image.Exif()
        encoding = {"<": "utf-16-le", ">": "utf-16-be"}[order]
        exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + OF_ANOTHER.encode(encoding)
        image.save(file, exif=exif)
    result = troupe("show", str(file))
    assert result.exit_code == 0
    first, *lines = result.stdout.splitlines()
    assert first == f"{file}: settings of another program"
    assert "\n".join(lines) == OF_ANOTHER.replace("\x1b", "\\u001b"), "no command to the terminal"
    assert [one["texts"]["parameters"] for one in document(file)] == [OF_ANOTHER]


def test_files_without_settings_and_files_that_are_none(tmp_path: Path) -> None:
    bare, workflow, note = tmp_path / "bare.png", tmp_path / "workflow.png", tmp_path / "note.txt"
    bare.write_bytes(encode_frames(FRAMES, "png"))
    info = PngInfo()
    info.add_text("workflow", "{}")
    Image.fromarray(FRAMES[0]).save(workflow, pnginfo=info)
    note.write_text("no picture")
    (tmp_path / "empty.mp4").touch()
    assert "empty.mp4 is no PNG" in troupe("show", str(tmp_path / "empty.mp4")).stdout
    result = troupe("show", str(bare), str(workflow), str(note))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{bare}: no settings: none were written, or a program has removed them",
        f"{workflow}: no settings of Troupe; texts of another program: workflow",
        f"{note} is no PNG, JPEG, WebP or MP4",
    ]
    assert_one_line(troupe("show", str(tmp_path / "nowhere.png")), "nowhere.png")


def test_who_has_signed_a_file(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("Paint Inc")
    manifests = ManifestWriter(Credentials.read(issued.certificate, issued.key), "Troupe", "1.2.3")
    request = request_of(PICTURES, prompt="a", seed=7)
    file = written(tmp_path, "webp", request)
    assert document(file)[0]["signature"] is None
    file.write_bytes(manifests.sign_for(request, file.read_bytes(), "webp"))
    lines = troupe("show", str(file)).stdout.splitlines()
    assert lines[-1] == "  signed by Paint Inc with Troupe 1.2.3, and not changed since"
    (action,) = document(file)[0]["signature"]["actions"]
    assert action["parameters"] == {"model": "m"}
    file.write_bytes(file.read_bytes().replace(b"seed", b"sEEd"))
    assert troupe("show", str(file)).stdout.splitlines()[-1].endswith("Troupe 1.2.3, AND CHANGED SINCE")
