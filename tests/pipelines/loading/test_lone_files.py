"""A part's folder may hold one file under the name, and in the keys, with which it was published for other programs."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLLTX2Video,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from pipelines.preconditions import weight_problems
from pipelines.single_file import check_auto_encoder, load_single_file
from tests.pipelines.loading.test_scaled_files import auto_encoder, encoder
from tests.pipelines.loading.test_single_file import all_parts, as_stability_has_it, renamed
from tests.pipelines.support.checkpoints import tiny_models, tiny_unknown, tiny_whole
from tests.pipelines.support.checkpoints.damage import Tensors, by_hand, scaled
from tests.pipelines.support.checkpoints.parts import flux2_auto_encoder, shake, shifted_auto_encoder

WAN_NAMES = {
    r"^quant_conv": "conv1",
    r"^post_quant_conv": "conv2",
    r"coder\.conv_in": "coder.conv1",
    r"coder\.norm_out": "coder.head.0",
    r"coder\.conv_out": "coder.head.2",
    r"mid_block\.resnets\.0": "middle.0",
    r"mid_block\.attentions\.0": "middle.1",
    r"mid_block\.resnets\.1": "middle.2",
    r"encoder\.down_blocks": "encoder.downsamples",
    r"\.norm1\.": ".residual.0.",
    r"\.conv1\.(?=weight|bias)(?<=\d\.conv1\.)": ".residual.2.",
    r"\.norm2\.": ".residual.3.",
    r"\.conv2\.": ".residual.6.",
    r"conv_shortcut": "shortcut",
}
"""Names of the auto-encoder's layers in Wan's repository, by patterns of diffusers' names."""
PER_STAGE = 4
"""Layers of a stage of Wan's decoder, which its makers count through all stages."""
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
LATENTS = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}


@pytest.fixture(scope="module")
def base(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


def lone(base: Path, part: str, target: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A copy of ``base`` whose ``part`` has ``tensors`` in a file of a name that ComfyUI's users have."""
    shutil.copytree(base, target)
    for file in (target / part).glob("*.safetensors"):
        file.unlink()
    name = "encoder_fp8_e4m3fn_scaled.safetensors"
    save_file(dict(tensors), target / part / name)
    (target / part / f"._{name}").write_bytes(b"Mac OS X")
    return target


def plain(tensors: Tensors) -> Tensors:
    return {f"model.{name}": x for name, x in tensors.items()} | {"spiece_model": torch.zeros(3, dtype=torch.uint8)}


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_text_encoder(base: Path, tmp_path: Path, is_scaled: bool) -> None:
    own = {name: x + 0.125 for name, x in load_file(base / "text_encoder" / "model.safetensors").items()}
    written = scaled(own, ".scale_weight") if is_scaled else own
    read = encoder(lone(base, "text_encoder", tmp_path / "model", plain(written)))
    expected = by_hand(written, ".scale_weight")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], x) for name, x in expected.items())


@pytest.mark.parametrize("written", [dict, as_stability_has_it], ids=["diffusers' names", "its makers' names"])
def test_an_auto_encoder(base: Path, tmp_path: Path, written: Any) -> None:
    own = {name: x + 0.125 for name, x in load_file(next((base / "vae").glob("*.safetensors"))).items()}
    folder = lone(base, "vae", tmp_path / "model", written(own))
    read = auto_encoder(folder)
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], x) for name, x in own.items())
    assert not [*weight_problems(Checkpoint(folder))]


def test_a_transformer(base: Path, tmp_path: Path) -> None:
    own = {name: x + 0.125 for name, x in load_file(next((base / "transformer").glob("*.safetensors"))).items()}
    folder = lone(base, "transformer", tmp_path / "model", own)
    (module,) = Checkpoint(folder).denoiser().modules.values()
    assert all(torch.equal(module.state_dict()[name], x) for name, x in own.items())
    with pytest.raises(ValueError, match=r"has weights of encoder_fp8\w+\.safetensors, which are read whole"):
        Checkpoint(folder).denoiser(sliced=True)


def test_parts_of_a_pipeline_without_blocks(folders: Callable[[Any], Path], tmp_path: Path) -> None:
    base = folders(tiny_whole.sana)
    for part in ("transformer", "text_encoder"):
        own = {name: x + 0.125 for name, x in load_file(next((base / part).glob("*.safetensors"))).items()}
        folder = lone(base, part, tmp_path / part, own)
        assert not [*weight_problems(Checkpoint(folder))]
        read = Checkpoint(folder).denoiser().modules[part].state_dict()
        assert all(torch.equal(read[name], x) for name, x in own.items())


def as_black_forest_has_it(vae: Tensors) -> Tensors:
    """FLUX.2: two convolutions within the halves, and the statistics of latents."""
    inner = {
        re.sub(r"^(post_)?quant", lambda one: f"{'de' if one[1] else 'en'}coder.{one[0]}", name): x
        for name, x in vae.items()
    }
    return {name.removeprefix("first_stage_model."): x for name, x in as_stability_has_it(inner).items()}


def as_wan_has_it(vae: Tensors) -> Tensors:
    def place(found: re.Match[str]) -> str:
        number = int(found[3]) if found[2] == "resnets" else PER_STAGE - 1
        return f"decoder.upsamples.{PER_STAGE * int(found[1]) + number}"

    names = {name: re.sub(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)", place, name) for name in vae}
    return {renamed(names[name], WAN_NAMES): x for name, x in vae.items()}


LTX2 = {
    "latent_channels": 4,
    "block_out_channels": (8,) * 4,
    "layers_per_block": (1,) * 5,
    "spatio_temporal_scaling": (True,) * 4,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "decoder_block_out_channels": (8,) * 3,
    "decoder_layers_per_block": (1,) * 4,
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "decoder_inject_noise": (False,) * 4,
    "upsample_residual": (False,) * 3,
    "upsample_factor": (1,) * 3,
}


def as_lightricks_has_it(vae: Tensors) -> Tensors:
    """Blocks and the layers between them are counted together, the middle ones too."""

    def place(found: re.Match[str]) -> str:
        half, first = found[1], 2 * int(found[2])
        if found[3] != "resnets":
            return f"{half}_blocks.{first + 1}"
        return f"{half}_blocks.{first + 2 if half == 'up' else first}.res_blocks"

    names: dict[str, str | Callable[[re.Match[str]], str]] = {
        r"(up|down)_blocks\.(\d)\.(resnets|(?:up|down)samplers\.0)": place,
        r"encoder\.mid_block\.resnets": "encoder.down_blocks.8.res_blocks",
        r"decoder\.mid_block\.resnets": "decoder.up_blocks.0.res_blocks",
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
    }
    written = dict(vae)
    for own, theirs in names.items():
        written = {re.sub(own, theirs, name): x for name, x in written.items()}
    return {f"vae.{name}": x for name, x in written.items()}


AUTO_ENCODERS: dict[str, tuple[Any, Callable[[], Any], Callable[[Tensors], Tensors]]] = {
    "flux": (AutoencoderKL, lambda: shifted_auto_encoder(4, 3), as_stability_has_it),
    "flux2": (AutoencoderKLFlux2, flux2_auto_encoder, as_black_forest_has_it),
    "wan": (AutoencoderKLWan, lambda: shake(AutoencoderKLWan(**WAN, **LATENTS)), as_wan_has_it),
    "ltx 2": (AutoencoderKLLTX2Video, lambda: shake(AutoencoderKLLTX2Video(**LTX2)), as_lightricks_has_it),
    "qwen image": (AutoencoderKLQwenImage, lambda: shake(AutoencoderKLQwenImage(**WAN, **LATENTS)), as_wan_has_it),
}


@pytest.mark.parametrize("name", AUTO_ENCODERS)
def test_auto_encoders_in_their_makers_names(tmp_path: Path, name: str) -> None:
    kind, make, written = AUTO_ENCODERS[name]
    vae, file = make(), tmp_path / "theirs.safetensors"
    vae.save_pretrained(tmp_path / "vae")
    own = vae.state_dict()
    theirs = written(own)
    assert len(theirs) == len(own)
    assert len(theirs.keys() & own.keys()) < 12
    save_file({key: x.contiguous() for key, x in theirs.items()}, file)
    read = load_single_file(kind, file, tmp_path / "vae", torch.device("cpu"), torch.float32).state_dict()
    assert read.keys() == own.keys()
    assert all(torch.equal(read[key], x) for key, x in own.items())
    key = next(key for key in theirs if "mean" in key or "mid" in key)
    save_file({one: x.contiguous() for one, x in theirs.items() if one != key}, file)
    with pytest.raises(ValueError, match=rf"is not exactly the {kind.__name__} that .* \(it lacks"):
        load_single_file(kind, file, tmp_path / "vae", torch.device("cpu"), torch.float32)


def test_a_decoder_alone_is_no_other_auto_encoder(tmp_path: Path) -> None:
    """An absent encoder and left-overs of training do not make an auto-encoder differ from the base's."""
    vae, file = AutoencoderKLWan(**WAN, **LATENTS), tmp_path / "whole.safetensors"
    vae.save_pretrained(tmp_path / "vae")
    decoder = {name: x.contiguous() for name, x in as_wan_has_it(vae.state_dict()).items() if "encoder" not in name}
    save_file({f"vae.{name}": x for name, x in decoder.items()} | {"vae.loss.logvar": torch.ones(1)}, file)
    check_auto_encoder(AutoencoderKLWan, file, tmp_path / "vae")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.safetensors", "b.safetensors"), "has a.safetensors, b.safetensors: leave one of these files there"),
        (("vae.pth",), "has vae.pth, which is not read: save it as safetensors"),
        (("diffusion_pytorch_model.safetensors.index.json",), "is no index of weights"),
    ],
)
def test_other_files_are_named_before_anything_starts(
    base: Path, tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "model")
    (file,) = (folder / "vae").glob("*.safetensors")
    for name in names:
        shutil.copy(file, file.with_name(name)) if name.endswith("s") else file.with_name(name).write_text("a pointer")
    file.unlink()
    assert re.search(message, next(weight_problems(Checkpoint(folder))))
    with pytest.raises(ValueError, match="vae"):
        auto_encoder(folder)


@pytest.mark.parametrize("make", [tiny_unknown.sdxl, tiny_whole.sdxl_controlled])
@pytest.mark.parametrize("is_other", [False, True])
def test_parts_beside_a_u_net_in_its_folder_are_those_of_the_base(
    folders: Callable[[Any], Path], make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_other: bool
) -> None:
    """The file is that of one part, though it has all parts of a pipeline: the others' folders are read."""
    base = folders(make)
    written, parts = all_parts(base, 0.125)
    if is_other:
        theirs = as_stability_has_it(shifted_auto_encoder(8, 3).state_dict())
        written = {key: x for key, x in written.items() if not key.startswith("first_stage_model.")} | theirs
    folder = lone(base, "unet", tmp_path / "model", {key: x.contiguous() for key, x in written.items()})
    if is_other:
        with pytest.raises(ValueError, match="has another auto-encoder than the AutoencoderKL of its base"):
            Checkpoint(folder).denoiser()
        return
    with caplog.at_level(logging.WARNING):
        unet = Checkpoint(folder).denoiser().modules["unet"]
    assert all(torch.equal(unet.state_dict()[key], x) for key, x in parts["unet"].items())
    assert "also has conditioner, first_stage_model, which are not read: these parts are those of" in caplog.text
