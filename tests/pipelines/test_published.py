"""Published models go by name, and their configurations are the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_config
from pipelines.loading import published_models, resolve_configuration, shipped_checkpoints
from tests.pipelines.support.real_configs import FLUX, WAN

REAL = FLUX | WAN
NEWER = {
    "FLUX.2-dev": 32_223_281_152,
    "FLUX.2-klein-4B": 3_875_544_576,
    "Qwen-Image": 20_430_401_088,
    "Z-Image-Turbo": 6_154_908_736,
}
"""Parameters of the transformers, whose cards say 32, 4, 20 and 6 billion."""


def test_every_real_configuration_is_there() -> None:
    assert set(published_models()) == {*REAL, *NEWER}


@pytest.mark.parametrize("name", NEWER)
def test_newer_models_have_as_many_parameters_as_they_should(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta", "bfloat16")
    assert checkpoint.weights_bytes() == 2 * NEWER[name], "in bfloat16"


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_configuration_is_the_published_one(name: str) -> None:
    path = resolve_configuration(name)
    read = {key: value for key, value in read_config(path, "transformer").items() if key != "_class_name"}
    assert read == REAL[name].config
    with torch.device("meta"):
        outline = Checkpoint.of_configuration(name, "meta").outline()
    assert len(outline.modules) == REAL[name].num_transformers
    for module in outline.modules.values():
        assert sum(weight.numel() for weight in module.parameters()) == REAL[name].num_parameters


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("FLUX.1-dev", {"text": 512, "image": 4096}),
        ("FLUX.1-schnell", {"text": 256, "image": 4096}),
        ("Wan2.1-T2V-14B", {"video": 21 * 45 * 80}),
        ("Wan2.2-TI2V-5B", {"video": 31 * 22 * 40}),
    ],
)
def test_tokens_of_the_default_size(name: str, tokens: dict[str, int]) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    with checkpoint.device:
        outline = checkpoint.outline()
    branches = checkpoint.first_step(checkpoint.defaults.request())
    assert outline.stream_lengths(branches[0].arguments) == tokens


def test_folders_and_shipped_models_come_first(tmp_path: Path) -> None:
    own = tmp_path / "FLUX.1-dev"
    own.mkdir()
    assert resolve_configuration(str(own)) == own
    for name in shipped_checkpoints():
        assert (resolve_configuration(name) / "model_index.json").is_file()


@pytest.mark.parametrize("name", [name for name in published_models() if not name.startswith("Wan")])
def test_auto_encoders_of_pictures_have_the_scale_that_their_transformers_expect(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    opened = OpenedPipeline(checkpoint.path, torch.device("meta"), torch.bfloat16)
    with torch.device("meta"):
        vae = opened.outline("vae")
    stages = vae.decoder.up_blocks
    scale = 2 ** sum(bool(getattr(stage, "upsamplers", None)) for stage in stages)
    assert scale == 8
    assert checkpoint.defaults.size_multiple == 2 * scale
