"""Parts take the bytes of their files, and decodes about the measured memory."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from pipelines.blocks.decoder import to_frames
from pipelines.blocks.footprint import Footprint, ForwardMeter, footprint
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.loading import PUBLISHED, SHIPPED
from pipelines.size import Size
from tests.pipelines.support.sample_requests import clip, picture

GIB = 2**30


@cache
def footprint_of(model: str, size: Size | None = None) -> Footprint:
    checkpoint = Checkpoint.of_configuration(model, "meta", "bfloat16")
    return checkpoint.footprint(checkpoint.defaults.request(size))


@cache
def encoders(model: str) -> Mapping[str, int | None]:
    return footprint(OpenedPipeline(PUBLISHED / model, torch.device("meta"), torch.bfloat16), 512, None).encoder


def num_values(folder: Path) -> int:
    """Return the number of values of all tensors in the headers of a part's files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        total += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


@pytest.mark.parametrize("model", ["flux-shapes", "kontext-shapes", "wan-shapes"])
def test_parts_take_what_the_files_hold(model: str) -> None:
    """A value takes two bytes in bfloat16, and four in parts that stay in float32."""
    parts = footprint_of(model)
    wide = Checkpoint.of_configuration(model, "meta", "bfloat16").spec.float32_parts
    loaded = Checkpoint.open(model, "cpu", torch.bfloat16)
    modules = dict(zip(parts.decoder, loaded.decoder().modules, strict=True))
    modules |= dict(zip(parts.encoder, loaded.text_encoder().modules, strict=True))
    assert all(type(x) is int for x in (*parts.encoder.values(), *parts.decoder.values()))
    assert {**parts.encoder, **parts.decoder} == {
        name: sum(weight.nbytes for weight in module.parameters()) for name, module in modules.items()
    }
    assert parts.unknown == ()
    assert set(parts.decoder) == {"vae"}
    for name, size in {**parts.encoder, **parts.decoder}.items():
        each = 4 if name in wide else 2
        assert size == pytest.approx(each * num_values(SHIPPED / model / name), rel=0.01), name


@pytest.mark.parametrize(
    ("model", "part", "file_bytes"),
    [
        ("FLUX.1-dev", "text_encoder", 246_144_152),
        ("FLUX.1-dev", "text_encoder_2", 9_524_648_584),
        ("FLUX.2-dev", "text_encoder", 48_022_801_408),
        ("FLUX.2-klein-4B", "text_encoder", 8_044_982_000),
        ("HunyuanVideo-1.5-720p_i2v", "image_encoder", 856_506_120),
        ("LTX-2", "text_encoder", 24_374_650_464),
        ("Qwen-Image", "text_encoder", 16_584_333_312),
        ("Wan2.1-I2V-14B-480P", "image_encoder", 1_264_219_360),
        ("Wan2.1-I2V-14B-480P", "text_encoder", 11_361_920_418),
        ("stable-diffusion-xl-base-1.0", "text_encoder_2", 1_389_382_176),
    ],
)
def test_encoders_of_published_models_take_what_is_published(model: str, part: str, file_bytes: int) -> None:
    """The sizes are those of the 16-bit files on the hub; the headers explain the tolerance.

    Parts that are loaded in float32 take twice as much.
    """
    wide = Checkpoint.of_configuration(model, "meta", "bfloat16").spec.float32_parts
    num_bytes = file_bytes * (2 if part in wide else 1)
    assert encoders(model)[part] == pytest.approx(num_bytes, rel=5e-4)


@pytest.mark.parametrize(
    ("model", "billions", "digits"), [("Qwen-Image-2.1", 8.77, 2), ("ERNIE-Image", 3.8, 1), ("MiniMax-H3", 33, 0)]
)
def test_encoders_have_as_many_parameters_as_their_publishers_say(model: str, billions: float, digits: int) -> None:
    """They are Qwen3-VL-8B-Instruct (8.77 B), Ministral-3-3B (3.4 B and 0.4 B for pictures), Qwen3-VL-32B-Instruct (33
    B).
    """
    size = encoders(model)["text_encoder"]
    assert size is not None
    assert round(size / 2 / 1e9, digits) == billions


@pytest.mark.parametrize(
    ("model", "size", "measured_gib"),
    [
        ("FLUX.1-dev", Size(width=2048, height=2048), 9.7),
        ("Wan2.1-T2V-14B", Size(width=832, height=480, num_frames=81), 9.3),
        ("HunyuanVideo-1.5-480p_t2v", Size(width=848, height=480, num_frames=121), 8.9),
    ],
)
def test_a_decode_takes_what_was_measured_or_little_more(model: str, size: Size, measured_gib: float) -> None:
    """Measured on an H200 with weights: benchmarks/reports/application_h200_2026-11-23.md and
    application_one_h200_2026-11-24.md. The estimate is at most a tenth too high, and never too low."""
    parts = footprint_of(model, size)
    assert parts.decode_bytes is not None
    weights = parts.decoder["vae"]
    assert weights is not None
    assert measured_gib < (parts.decode_bytes + weights) / GIB < 1.1 * measured_gib


@pytest.mark.parametrize(
    ("model", "before_mib", "after_mib"),
    [("FLUX.1-dev", 94.5, 2 * 94.5), ("Qwen-Image", 139.8, 160.7), ("Wan2.1-T2V-14B", 2 * 139.8, 160.7)],
)
def test_compiled_decoders_take_other_weights(model: str, before_mib: float, after_mib: float) -> None:
    """A picture's is copied. Fused clips took 160 MiB on an H200; float32 ones become float16, too."""
    parts = footprint(OpenedPipeline(PUBLISHED / model, torch.device("meta"), torch.bfloat16), 512, None)
    assert parts.compiled_bytes / 2**20 == pytest.approx(after_mib - before_mib, abs=0.1)


def test_what_nobody_knows_is_said(tmp_path: Path) -> None:
    folder = shutil.copytree(PUBLISHED / "Krea-2-Turbo", tmp_path / "with another encoder")
    opened = OpenedPipeline(folder, torch.device("meta"), torch.bfloat16)
    assert footprint(opened, 512, None).encoder["text_encoder"] is None
    assert footprint_of("stable-diffusion-xl-base-1.0").decode is None


def test_pictures_become_bytes_in_the_memory_of_one() -> None:
    """Several large ones in float32 would exceed ``decoder.memory_gib``; the frames of a clip are smaller."""
    peaks = []
    for request, count in ((picture(), 1), (picture(), 4), (clip(), 4)):
        pixels_FCHW = torch.zeros(count, 3, 64, 64, dtype=torch.bfloat16)
        with ForwardMeter() as meter:
            to_frames(pixels_FCHW, request)
        peaks.append(meter.peak_bytes)
    one, several, frames = peaks
    assert several - one < 100, "the sum of each"
    assert frames > 3 * one


@pytest.mark.parametrize("model", ["flux-shapes", "wan-shapes", "FLUX.2-klein-4B"])
def test_an_estimate_makes_the_outline_of_each_part_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's blocks need no second transformer."""
    outline, made = OpenedPipeline._part_outline, list[str]()
    monkeypatch.setattr(OpenedPipeline, "_part_outline", lambda self, name: made.append(name) or outline(self, name))  # type: ignore[func-returns-value]
    checkpoint = Checkpoint.of_configuration(model, "meta", "bfloat16")
    request = checkpoint.defaults.request()
    assert checkpoint.weightless()
    assert checkpoint.footprint(request)
    assert checkpoint.largest_step(request)
    assert sorted(made) == ["transformer", "vae"]
