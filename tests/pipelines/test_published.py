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
    "Cosmos3-Nano": 15_191_503_104,
    "FLUX.2-dev": 32_223_281_152,
    "FLUX.2-klein-4B": 3_875_544_576,
    "HunyuanVideo-1.5-480p_t2v": 8_326_608_160,
    "LTX-2": 18_876_174_592,
    "Qwen-Image": 20_430_401_088,
    "Wan2.1-I2V-14B-480P": 16_424_075_584,
    "Wan2.2-I2V-A14B": 2 * 14_318_085_184,
    "Z-Image-Turbo": 6_154_908_736,
}
"""Parameters of the transformers, whose cards say 16 (with an encoder of pictures, which no generation uses), 32, 4,
8.3, 19, 20, 16, twice 14, and 6 billion.

Wan, LTX-2 and HunyuanVideo 1.5 are as in ``scripts/convert_{wan,ltx2,hunyuan_video1_5}_to_diffusers.py`` of
huggingface/diffusers, but for HunyuanVideo's ``task_type``, which that script has wrong for 480p: it is in the model's
name. Cosmos 3 is as in the ``config.json`` of nvidia/Cosmos3-Nano; its schedule's shift is that of diffusers' page
about it.
"""


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
        ("Wan2.2-I2V-A14B", {"video": 21 * 30 * 52}),
        ("Wan2.1-I2V-14B-480P", {"video": 21 * 30 * 52}),
        ("HunyuanVideo-1.5-480p_t2v", {"video": 31 * 30 * 53, "text": 1000 + 256}),
        ("LTX-2", {"video": 16 * 16 * 24}),
        ("Cosmos3-Nano", {"text": 300, "generated": 48 * 23 * 40 + 197}),
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


def test_a_hub_id_is_the_published_model() -> None:
    ids = ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "Wan-AI/Wan2.2-I2V-A14B-Diffusers")
    assert [resolve_configuration(one).name for one in ids] == ["HunyuanVideo-1.5-480p_t2v", "Wan2.2-I2V-A14B"]


CLIPS = [name for name in published_models() if name.startswith(("Cosmos", "HunyuanVideo", "LTX", "Wan"))]


@pytest.mark.parametrize("name", CLIPS)
@torch.no_grad()
def test_auto_encoders_of_clips_have_the_scales_that_requests_are_made_by(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    opened = OpenedPipeline(checkpoint.path, torch.device("meta"), torch.float32)
    with torch.device("meta"):
        vae = opened.outline("vae")
        channels = vae.config.get("z_dim") or vae.config["latent_channels"]
        clip_BCFHW = vae.decode(torch.zeros(1, channels, 2, 3, 4)).sample
    temporal, spatial = checkpoint.defaults.frame_multiple, clip_BCFHW.shape[-1] // 4
    assert clip_BCFHW.shape == (1, 3, 1 + temporal, 3 * spatial, 4 * spatial)
    assert checkpoint.defaults.size_multiple % spatial == 0


@pytest.mark.parametrize("name", sorted(set(published_models()) - set(CLIPS)))
def test_auto_encoders_of_pictures_have_the_scale_that_their_transformers_expect(name: str) -> None:
    checkpoint = Checkpoint.of_configuration(name, "meta")
    opened = OpenedPipeline(checkpoint.path, torch.device("meta"), torch.bfloat16)
    with torch.device("meta"):
        vae = opened.outline("vae")
    stages = vae.decoder.up_blocks
    scale = 2 ** sum(bool(getattr(stage, "upsamplers", None)) for stage in stages)
    assert scale == 8
    assert checkpoint.defaults.size_multiple == 2 * scale
