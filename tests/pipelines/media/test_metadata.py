"""Other programs read settings in files: Pillow, FFmpeg, and the patterns of AUTOMATIC1111's readers."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from pipelines.media.encode import encode_frames
from pipelines.media.metadata import MetadataWriter
from pipelines.request import Lora, MediaRequest, MetadataLevel

PROMPT = 'a red circle, "very" round\na second line: 猫 ü'
REQUEST = MediaRequest(
    request_id="r",
    model="flux-shapes",
    kind="image",
    prompt=PROMPT,
    negative_prompt="blue",
    width=48,
    height=32,
    num_inference_steps=8,
    guidance_scale=3.5,
    true_cfg_scale=2.0,
    seed=2**53 - 1,
    strength=0.75,
    loras=(Lora(name="watercolour", scale=0.8),),
    key="hash-of-a-key",
)
CLIP = MediaRequest(**{name: getattr(REQUEST, name) for name in REQUEST.__slots__} | {"kind": "video", "fps": 8})
SAID = {
    "software": "Troupe 1.2.3",
    "model": "flux-shapes",
    "prompt": PROMPT,
    "negative_prompt": "blue",
    "seed": 2**53 - 1,
    "size": "48x32",
    "num_inference_steps": 8,
    "guidance_scale": 3.5,
    "true_cfg_scale": 2.0,
    "lora": [{"name": "watercolour", "scale": 0.8}],
    "strength": 0.75,
    "sampler": "FlowMatchEulerDiscreteScheduler",
}
FRAMES = np.random.default_rng(0).integers(0, 256, (1, 32, 48, 3), dtype=np.uint8)
FORMATS = ("png", "jpeg", "webp", "mp4")
PARAMETER = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
"""The pattern by which readers of this form find names and values in its last line."""


def file_of(format: str, level: MetadataLevel = "full", request: MediaRequest | None = None) -> bytes:
    writer = MetadataWriter(level=level, software="Troupe 1.2.3", sampler="FlowMatchEulerDiscreteScheduler")
    texts = writer.texts(request or (CLIP if format == "mp4" else REQUEST))
    return encode_frames(FRAMES, format, fps=8, texts=texts)  # type: ignore[arg-type]


def texts_of(data: bytes, format: str) -> tuple[str, str]:
    """Return the two texts of a file: AUTOMATIC1111's form, and JSON."""
    if format == "mp4":
        with av.open(io.BytesIO(data), "r") as container:
            tags: Any = container.metadata
        return tags.get("comment", ""), tags.get("description", "")
    with Image.open(io.BytesIO(data)) as image:
        if format == "png":
            return image.info.get("parameters", ""), image.info.get("troupe", "")
        tags = image.getexif().get_ifd(0x8769)
    comment = tags.get(0x9286, b"")
    assert comment[:8] in (b"UNICODE\0", b"")
    return comment[8:].decode("utf-16-be"), tags.get(0x927C, b"").decode()


@pytest.mark.parametrize("format", FORMATS)
def test_files_hold_all_settings(format: str) -> None:
    text, document = texts_of(file_of(format), format)
    clip = {"num_frames": 1, "fps": 8} if format == "mp4" else {}
    assert json.loads(document) == SAID | clip
    *prompt, line = text.split("\n")
    assert "\n".join(prompt) == f"{PROMPT} <lora:watercolour:0.8>\nNegative prompt: blue"
    assert dict(PARAMETER.findall(line)) == {
        "Steps": "8",
        "Sampler": "FlowMatchEulerDiscreteScheduler",
        "CFG scale": "2",
        "Distilled CFG Scale": "3.5",
        "Seed": "9007199254740991",
        "Size": "48x32",
        "Model": "flux-shapes",
        "Denoising strength": "0.75",
        "Version": "Troupe 1.2.3",
        **({"Frames": "1", "FPS": "8"} if clip else {}),
    }


@pytest.mark.parametrize("format", FORMATS)
def test_files_hold_the_seed_alone_or_nothing(format: str) -> None:
    text, document = texts_of(file_of(format, "seed"), format)
    assert json.loads(document) == {"software": "Troupe 1.2.3", "model": "flux-shapes", "seed": 2**53 - 1}
    assert dict(PARAMETER.findall(text)) == {
        "Seed": "9007199254740991",
        "Model": "flux-shapes",
        "Version": "Troupe 1.2.3",
    }
    plain = file_of(format, "none")
    assert texts_of(plain, format) == ("", "")
    assert plain == encode_frames(FRAMES, format, fps=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_settings_change_no_pixel_and_the_same_request_gives_the_same_bytes(format: str) -> None:
    marked, plain = file_of(format), file_of(format, "none")
    assert marked == file_of(format)
    with av.open(io.BytesIO(marked), "r") as one, av.open(io.BytesIO(plain), "r") as other:
        pictures = [
            np.stack([frame.to_ndarray(format="rgb24") for frame in each.decode(video=0)]) for each in (one, other)
        ]
    np.testing.assert_array_equal(pictures[0], pictures[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("prompt", ["a\0b", "half a character \ud800", "猫" * 32_000])
def test_any_prompt_makes_a_file(format: str, prompt: str) -> None:
    """JPEG has room for 64 KB beside its pixels, so a longer text is cut."""
    fields = {name: getattr(CLIP if format == "mp4" else REQUEST, name) for name in REQUEST.__slots__}
    text, document = texts_of(file_of(format, request=MediaRequest(**fields | {"prompt": prompt})), format)
    if format == "jpeg" and len(prompt) > 1000:
        assert (text.count("猫"), document) == (32_000, "")
    else:
        assert json.loads(document)["prompt"] == prompt
        assert f"{prompt} <lora".replace("\0", "").replace("\ud800", "?") in text
