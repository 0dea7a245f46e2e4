"""A transformer in one file, in diffusers' names or its makers', beside a folder with all else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deployments.model_config import ModelConfig
from pipelines.checkpoint import Checkpoint
from pipelines.single_file import load_single_file, split_source
from tests.pipelines.support.checkpoints import tiny, tiny_models, tiny_video

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
MAKERS_NAMES = {
    "all_x_embedder.2-1.": "x_embedder.",
    "all_final_layer.2-1.": "final_layer.",
    ".to_out.0.": ".out.",
    ".norm_q.": ".q_norm.",
    ".norm_k.": ".k_norm.",
}


@pytest.fixture(scope="module")
def base(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


@pytest.fixture(scope="module")
def tuned(base: Path) -> dict[str, Tensor]:
    """Other weights than those of the folder."""
    return {name: weight + 0.125 for name, weight in load_file(base / WEIGHTS).items()}


def as_its_makers_have_it(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other names, and queries, keys and values of the attention as one."""
    parts: dict[str, dict[str, Tensor]] = {}
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        place, _, last = name.partition(".attention.to_")
        if last in ("q.weight", "k.weight", "v.weight"):
            parts.setdefault(place, {})[last[0]] = weight
            continue
        for theirs, own in MAKERS_NAMES.items():
            name = name.replace(theirs, own)
        renamed[f"model.diffusion_model.{name}"] = weight
    joined = {place: torch.cat([three[one] for one in "qkv"]) for place, three in parts.items()}
    return renamed | {f"model.diffusion_model.{place}.attention.qkv.weight": x for place, x in joined.items()}


def weights_of(source: str) -> dict[str, Tensor]:
    (module,) = Checkpoint.open(source).denoiser().modules.values()
    return dict(module.state_dict())


@pytest.mark.parametrize("written", [dict, as_its_makers_have_it], ids=["diffusers' names", "its makers' names"])
def test_the_transformer_is_that_of_the_file(
    base: Path, tuned: dict[str, Tensor], written: Any, tmp_path: Path
) -> None:
    file = tmp_path / "tuned.safetensors"
    save_file(written(tuned), file)
    read = weights_of(f"{file}@{base}")
    assert set(read) == set(tuned)
    for name, weight in tuned.items():
        torch.testing.assert_close(read[name], weight)
    assert not torch.equal(weights_of(str(base))["cap_pad_token"], tuned["cap_pad_token"])


def test_a_gang_that_quantises_reads_the_same_values(base: Path, tuned: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "tuned.safetensors"
    save_file(tuned, file)
    (module,) = Checkpoint.open(f"{file}@{base}").denoiser(quantised=True).modules.values()
    assert all(weight.equal(tuned[name]) for name, weight in module.state_dict().items())


def test_a_published_name_is_base_enough_for_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tuned.safetensors"
    file.touch()
    checkpoint = Checkpoint.of_configuration(f"{file}@Tongyi-MAI/Z-Image-Turbo", "meta")
    assert checkpoint.path.name == "Z-Image-Turbo"


def test_names_of_other_models_are_as_they_were() -> None:
    for source in ("flux-shapes", "owner/name", "/a/folder", "a@b"):
        assert split_source(source) == (None, source)


def test_a_file_needs_a_base_and_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"tuned.safetensors is a transformer alone: name the folder or hub id of the other parts, as base",
    ):
        Checkpoint.open("tuned.safetensors")
    with pytest.raises(ValueError, match=r"there is no file .*tuned.safetensors"):
        Checkpoint.open(f"{tmp_path}/tuned.safetensors@flux-shapes")


def test_another_models_file_is_an_error(base: Path, tuned: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({name: weight for name, weight in tuned.items() if "layers.1" not in name}, file)
    with pytest.raises(ValueError, match=r"other.safetensors is not exactly the ZImageTransformer2DModel that"):
        Checkpoint.open(f"{file}@{base}").denoiser()
    with pytest.raises(ValueError, match="is not exactly the FluxTransformer2DModel that"):
        Checkpoint.open(f"{file}@{tiny.flux(tmp_path / 'flux')}").denoiser()


def test_what_cannot_be_read_so_is_an_error(base: Path, tmp_path: Path) -> None:
    from diffusers import HunyuanVideo15Transformer3DModel

    file = tmp_path / "tuned.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="reads no HunyuanVideo15Transformer3DModel from one file"):
        load_single_file(HunyuanVideo15Transformer3DModel, file, base, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="which is read whole: say load: whole"):
        Checkpoint.open(f"{file}@{base}").denoiser(sliced=True)
    two = tiny_video.wan_picture_two_experts(tmp_path / "two")
    with pytest.raises(ValueError, match=r"is one transformer, and .* has transformer, transformer_2"):
        Checkpoint.open(f"{file}@{two}").denoiser()


def test_a_configuration_names_file_and_base() -> None:
    model = ModelConfig(name="tuned", path="/models/tuned.safetensors", base="owner/name")
    assert model.source == "/models/tuned.safetensors@owner/name"
    assert ModelConfig(name="flux-shapes").source == "flux-shapes"
    with pytest.raises(ValueError, match=r"base is 'owner/name', which needs a .safetensors or .gguf file as path"):
        ModelConfig(name="flux-shapes", base="owner/name")


def test_other_parts_and_what_training_needs_may_lie_in_the_file(
    base: Path, tuned: dict[str, Tensor], tmp_path: Path
) -> None:
    """As whole pipelines in one file, and files with a tensor that diffusers' translation takes out by name."""
    file = tmp_path / "whole.safetensors"
    more = ("first_stage_model.decoder.conv_in.weight", "model_ema.decay", "model.diffusion_model.norm_final.weight")
    save_file(as_its_makers_have_it(tuned) | {name: torch.ones(1) for name in more}, file)
    torch.testing.assert_close(weights_of(f"{file}@{base}")["cap_pad_token"], tuned["cap_pad_token"])


@pytest.mark.parametrize("written", [dict, as_its_makers_have_it], ids=["diffusers' names", "its makers' names"])
def test_a_key_that_nothing_reads_is_named(base: Path, tuned: dict[str, Tensor], written: Any, tmp_path: Path) -> None:
    file, tensors = tmp_path / "more.safetensors", written(tuned)
    key = next(name for name in tensors if name.endswith("feed_forward.w1.weight")).replace("w1", "w4")
    save_file(tensors | {key: torch.ones(1)}, file)
    with pytest.raises(ValueError, match=rf"has no place for {key}"):
        Checkpoint.open(f"{file}@{base}").denoiser()
