"""A part's folder may hold one file with the name and keys of other programs."""

from __future__ import annotations

import json
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
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLMiniMaxH3,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    AutoencoderTiny,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from pipelines.preconditions import weight_problems
from pipelines.single_file import check_auto_encoder, load_single_file
from tests.pipelines.loading.test_scaled_files import auto_encoder, encoder
from tests.pipelines.loading.test_single_file import all_parts, as_stability_has_it, renamed
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_hunyuan,
    tiny_minimax,
    tiny_models,
    tiny_unknown,
    tiny_whole,
)
from tests.pipelines.support.checkpoints.damage import Tensors, by_hand, scaled
from tests.pipelines.support.checkpoints.parts import flux2_auto_encoder, shake, shifted_auto_encoder
from tests.pipelines.support.references.pairs import Pair, check_pixels
from tests.pipelines.support.sample_requests import picture

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
"""Wan's names of auto-encoder layers by patterns of diffusers' names."""
PER_STAGE = 4
"""Layers in a stage of Wan's decoder; Wan's names number them through all stages."""
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
LATENTS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 2.0, 1.1, 0.7]}
RESIDUAL = {
    "decoder_base_dim": 16,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
}
HUNYUAN = {"latent_channels": 4, "block_out_channels": (8, 16, 16), "layers_per_block": 2}
HUNYUAN_NAMES = {
    r"(down|up)_blocks\.(\d)\.resnets\.": r"\1.\2.block.",
    r"(down|up)_blocks\.(\d)\.\1samplers\.0\.": r"\1.\2.\1sample.",
    r"mid_block\.resnets\.0\.": "mid.block_1.",
    r"mid_block\.resnets\.1\.": "mid.block_2.",
    r"mid_block\.attentions\.0\.(?:to_)?": "mid.attn_1.",
    r"conv_shortcut": "nin_shortcut",
}
"""Tencent's names (``hunyuanvideo_15_vae.py``) by patterns of diffusers' names."""
MINIMAX = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 2),
    "temporal_downsample_factors": (1, 2, 2, 1),
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 3,
    "decoder_attention_head_dim": 8,
    "decoder_num_register_tokens": 2,
    "decoder_ffn_mult": 2,
}
MINIMAX_NAMES = {
    r"encoder\.down_blocks\.(\d)\.resnets\.": r"encoder.down.\1.block.",
    r"encoder\.down_blocks\.(\d)\.downsamplers\.0\.": r"encoder.down.\1.downsample.",
    r"conv_shortcut": "nin_shortcut",
    r"decoder\.proj_in": "decoder.x_embedder",
    r"attn\.to_out\.0": "attn.to_out",
    r"ff\.net\.0\.proj": "ff.w1",
    r"ff\.net\.2": "ff.w2",
}
"""MiniMax's names by patterns of diffusers' names."""


@pytest.fixture(scope="module")
def base(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


def lone(base: Path, part: str, target: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Return a copy of ``base`` whose ``part`` has ``tensors`` in a file named as in ComfyUI."""
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


TOWER = {f"visual.{name}.weight": torch.ones(2, 2) for name in ("blocks.0.attn.qkv", "merger.ln_q")}


@pytest.mark.parametrize(
    ("part", "written"),
    [
        (
            "text_encoder",
            lambda own: (
                plain(scaled(own, ".scale_weight"))
                | {**TOWER, "lm_head.weight": torch.ones(2, 2), "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
            ),
        ),
        ("text_encoder_2", lambda own: {name: x.half() for name, x in own.items()}),
        ("image_encoder", lambda own: {f"vision_model.{name}": x.half() for name, x in own.items()}),
    ],
    ids=["qwen_2.5_vl_7b_fp8_scaled", "byt5_small_glyphxl_fp16", "sigclip_vision_patch14_384"],
)
def test_all_encoders_of_a_model(folders: Callable[[Any], Path], tmp_path: Path, part: str, written: Any) -> None:
    """HunyuanVideo 1.5 reads the language model of the first alone."""
    base = folders(tiny_hunyuan.hunyuan_video_picture)
    own = {name: (x + 0.125).half().float() for name, x in load_file(base / part / "model.safetensors").items()}
    folder = lone(base, part, tmp_path / "model", written(own))
    assert not [*weight_problems(Checkpoint(folder))]
    read = getattr(Checkpoint(folder).text_encoder()._pipeline, part).state_dict()
    expected = by_hand(scaled(own, ".scale_weight"), ".scale_weight") if part == "text_encoder" else own
    assert read.keys() >= expected.keys()
    assert all(torch.equal(read[name], x) for name, x in expected.items())


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_eight_bit_weights_without_scales(folders: Callable[[Any], Path], tmp_path: Path, part: str) -> None:
    """diffusers reads neither class from a single file."""
    base = folders(tiny_hunyuan.hunyuan_video)
    own = {name: x.to(torch.float8_e4m3fn) for name, x in load_file(next((base / part).glob("*.safetensors"))).items()}
    read = Checkpoint(lone(base, part, tmp_path / "model", own))._opened.load_part(part).state_dict()
    assert all(read[name].equal(x.float()) for name, x in own.items())


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
    """Return FLUX.2's names: two convolutions inside the halves, and statistics of latents."""
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


def ltx2(num_up: int) -> Any:
    """Return the auto-encoder with three upsamplings, or four (LTX-2.3)."""
    down: dict[str, Any] = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5, "latent_channels": 4}
    down["downsample_type"] = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    every, blocks = (True,) * num_up, (1,) * (num_up + 1)
    up: dict[str, Any] = {"decoder_block_out_channels": (8,) * num_up, "decoder_layers_per_block": blocks}
    up |= {"decoder_inject_noise": (False,) * (num_up + 1), "upsample_residual": (False,) * num_up}
    up |= {"decoder_spatio_temporal_scaling": every, "upsample_type": ("spatiotemporal",) * num_up}
    return shake(AutoencoderKLLTX2Video(**down, **up, spatio_temporal_scaling=(True,) * 4, upsample_factor=every))


def as_lightricks_has_it(vae: Tensors) -> Tensors:
    """Return Lightricks' names, which number blocks and the layers between them together."""

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


def as_wan22_has_it(vae: Tensors) -> Tensors:
    """Return Wan 2.2's names: the resampling layer is the last of each stage's blocks."""

    def place(found: re.Match[str]) -> str:
        way, layer = found[2], found[4] or (PER_STAGE - 1 if found[2] == "up" else PER_STAGE - 2)
        return f"{found[1]}coder.{way}samples.{found[3]}.{way}samples.{layer}"

    nested = r"(en|de)coder\.(down|up)_blocks\.(\d)\.(?:resnets\.(\d)|\2sampler)"
    return {renamed(re.sub(nested, place, name), WAN_NAMES): x for name, x in vae.items()}


def as_qwen21_has_it(vae: Tensors) -> Tensors:
    """Return ComfyUI's names: Wan 2.2's layers, with convolutions of clips."""
    of_pictures = re.compile(r"\.resample\.|\.(to_qkv|proj)\.")
    return {
        name: x.unsqueeze(2) if name.endswith(".weight") and not of_pictures.search(name) else x
        for name, x in as_wan22_has_it(vae).items()
    }


def as_tencent_has_it(vae: Tensors) -> Tensors:
    return {renamed(name, HUNYUAN_NAMES): x for name, x in vae.items()}


def as_minimax_has_it(vae: Tensors) -> Tensors:
    """Return MiniMax's layout: query, key and value rows per head, the gate before the values."""
    written: Tensors = {}
    for name, x in vae.items():
        if ".attn.to_q." in name:
            three = [vae[name.replace("to_q", f"to_{one}")].chunk(3) for one in "qkv"]  # as many heads
            written[name.replace("to_q", "to_qkv")] = torch.cat([x for head in zip(*three, strict=True) for x in head])
        elif not re.search(r"\.attn\.to_[kv]\.", name):
            values, gate = x.chunk(2) if ".ff.net.0." in name else (x, x[:0])
            written[renamed(name, MINIMAX_NAMES)] = torch.cat([gate, values])
    return written


AUTO_ENCODERS: dict[str, tuple[Any, Callable[[], Any], Callable[[Tensors], Tensors]]] = {
    "flux": (AutoencoderKL, lambda: shifted_auto_encoder(4, 3), as_stability_has_it),
    "flux2": (AutoencoderKLFlux2, flux2_auto_encoder, as_black_forest_has_it),
    "wan": (AutoencoderKLWan, lambda: shake(AutoencoderKLWan(**WAN, **LATENTS)), as_wan_has_it),
    "ltx 2": (AutoencoderKLLTX2Video, lambda: ltx2(3), as_lightricks_has_it),
    "ltx 2.3": (AutoencoderKLLTX2Video, lambda: ltx2(4), as_lightricks_has_it),
    "qwen image": (AutoencoderKLQwenImage, lambda: shake(AutoencoderKLQwenImage(**WAN, **LATENTS)), as_wan_has_it),
    "wan 2.2": (
        AutoencoderKLWan,
        lambda: shake(AutoencoderKLWan(**WAN, **LATENTS, **RESIDUAL)),
        as_wan22_has_it,
    ),
    "qwen image 2.1": (
        AutoencoderKLQwenImage21,
        lambda: shake(AutoencoderKLQwenImage21(**WAN, **LATENTS, temperal_downsample=[False, True, True])),
        as_qwen21_has_it,
    ),
    "hunyuan video": (
        AutoencoderKLHunyuanVideo15,
        lambda: shake(
            AutoencoderKLHunyuanVideo15(**HUNYUAN, spatial_compression_ratio=4, temporal_compression_ratio=2)
        ),
        as_tencent_has_it,
    ),
    "minimax h3": (
        AutoencoderKLMiniMaxH3,
        lambda: shake(AutoencoderKLMiniMaxH3(**MINIMAX, **LATENTS)),
        as_minimax_has_it,
    ),
}


@pytest.mark.parametrize("name", AUTO_ENCODERS)
def test_auto_encoders_in_their_makers_names(tmp_path: Path, name: str) -> None:
    kind, make, written = AUTO_ENCODERS[name]
    vae, file = make(), tmp_path / "theirs.safetensors"
    vae.save_pretrained(tmp_path / "vae")
    own = vae.state_dict()
    theirs = written(own)
    assert sum(x.numel() for x in theirs.values()) == sum(x.numel() for x in own.values())
    assert len(theirs.keys() & own.keys()) < len(own) / 2
    save_file({key: x.contiguous() for key, x in theirs.items()}, file)
    read = load_single_file(kind, file, tmp_path / "vae", torch.device("cpu"), torch.float32).state_dict()
    assert read.keys() == own.keys()
    assert all(torch.equal(read[key], x) for key, x in own.items())
    key = next(key for key in theirs if "mean" in key or "mid" in key or "register" in key)
    save_file({one: x.contiguous() for one, x in theirs.items() if one != key}, file)
    with pytest.raises(ValueError, match=rf"is not exactly the {kind.__name__} that .* \(it lacks"):
        load_single_file(kind, file, tmp_path / "vae", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("make", "name", "frames"),
    [
        (tiny.wan_per_token, "wan 2.2", 5),
        (tiny_hunyuan.hunyuan_video, "hunyuan video", 5),
        (tiny_minimax.minimax_h3, "minimax h3", 22),
    ],
)
def test_clips_of_auto_encoders_in_their_makers_names(
    folders: Callable[[Any], Path], tmp_path: Path, make: Any, name: str, frames: int
) -> None:
    """Encoding and decoding equal diffusers' class, from float16 files as in ComfyUI."""
    _, make_vae, written = AUTO_ENCODERS[name]
    vae = make_vae().half().float()
    theirs = {key: x.half().contiguous() for key, x in written(vae.state_dict()).items()}
    if name == "minimax h3":
        theirs |= {key: torch.tensor(values).half() for key, values in LATENTS.items()}
        theirs["decoder.mask_token"] = torch.zeros(1, 1, 24).half()
    folder = lone(folders(make), "vae", tmp_path / "model", theirs)
    vae.save_config(folder / "vae")
    assert not [*weight_problems(Checkpoint(folder))]
    read: Any = Checkpoint(folder).decoder()._pipeline.vae
    scales = ("latents_mean", "latents_std", "scaling_factor")
    assert [read.config.get(key) for key in scales] == [vae.config.get(key) for key in scales]
    clip = torch.randn(1, 3, frames, 64, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    with torch.no_grad():
        latents = vae.encode(clip).latent_dist.mode()
        pixels = vae.decode(latents).sample.clamp(-1, 1)
        assert torch.equal(read.encode(clip).latent_dist.mode(), latents)
        torch.testing.assert_close(read.decode(latents).sample.clamp(-1, 1), pixels)  # ours may go frame by frame
    assert latents.shape[2] > 1
    assert pixels.std() > 0.1


OF_TINY = "tiny auto-encoders are read in diffusers' names, from folders whose config.json, and the model's index,"
OTHERS: dict[str, tuple[str, Tensors, str]] = {
    "taef1, from its makers": ("flux", {"1.weight": torch.ones(4, 4, 3, 3), "3.conv.0.bias": torch.ones(4)}, OF_TINY),
    "taef1 of ComfyUI": ("flux", {"taesd_decoder.1.bias": torch.ones(4), "vae_scale": torch.ones(())}, OF_TINY),
    "taew2_2": ("wan 2.2", {"decoder.1.weight": torch.ones(4), "encoder.12.conv.0.bias": torch.ones(4)}, OF_TINY),
    "lighttae_hv1_5": ("hunyuan video", {"decoder.22.bias": torch.ones(12)}, OF_TINY),
    "unknown": ("hunyuan video", {"layers.first.weight": torch.ones(1)}, "its names, such as layers.first.weight, are"),
    "nothing": ("flux", {}, "give the auto-encoder of this model"),
    "other statistics": ("minimax h3", {"latents_mean": torch.zeros(4)}, "has no place for latents_mean"),
}
"""Auto-encoder of a configuration, tensors of another one's file, and the error."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_auto_encoders_are_refused(tmp_path: Path, name: str) -> None:
    of, tensors, message = OTHERS[name]
    kind, make, written = AUTO_ENCODERS[of]
    (vae := make()).save_pretrained(tmp_path / "vae")
    theirs = tensors if name != "other statistics" else written(vae.state_dict()) | tensors
    save_file({key: x.contiguous() for key, x in theirs.items()}, file := tmp_path / "theirs.safetensors")
    with pytest.raises(ValueError, match=rf"is not exactly the {kind.__name__} that .*{message}"):
        load_single_file(kind, file, tmp_path / "vae", torch.device("cpu"), torch.float32)


def with_tiny_auto_encoder(base: Path, target: Path) -> Path:
    """Return a copy of ``base`` with TAESD; older configurations list only the stages of both halves."""
    stages = {f"{half}_block_out_channels": (8,) * 3 for half in ("encoder", "decoder")}
    blocks = {f"num_{half}_blocks": (1,) * 3 for half in ("encoder", "decoder")}
    shutil.copytree(base, target)
    shutil.rmtree(target / "vae")
    vae: Any = shake(AutoencoderTiny(latent_channels=4, **stages, **blocks))
    vae.save_pretrained(target / "vae")
    for file, change in (("model_index.json", {"vae": ["diffusers", "AutoencoderTiny"]}), ("vae/config.json", {})):
        written = json.loads((target / file).read_text()) | change
        written.pop("block_out_channels", None)
        (target / file).write_text(json.dumps(written))
    return target


def test_a_tiny_auto_encoder_paints_what_diffusers_paints_with_it(tiny_flux: Path, tmp_path: Path) -> None:
    check_pixels(Pair(with_tiny_auto_encoder(tiny_flux, tmp_path / "model")), picture())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_models.flux2_klein, "its latents are those of an AutoencoderKLFlux2:"),
        (tiny_hunyuan.hunyuan_video, "its latents are those of an AutoencoderKLHunyuanVideo15:"),  # reads keys of it
        (tiny_whole.cogvideox, "its latents are those of an AutoencoderKLCogVideoX:"),
        (tiny_whole.sana, "its latents are those of an AutoencoderDC:"),
        (tiny_models.z_image, "makes 4 channels of latents, and the transformer takes 16:"),
    ],
)
def test_a_tiny_auto_encoder_of_other_latents_is_refused(
    folders: Callable[[Any], Path], tmp_path: Path, make: Any, message: str
) -> None:
    folder = with_tiny_auto_encoder(folders(make), tmp_path / "model")
    with pytest.raises(ValueError, match=f"an AutoencoderTiny,? .*{message}"):
        Checkpoint(folder).defaults  # noqa: B018


def test_a_decoder_alone_is_no_other_auto_encoder(tmp_path: Path) -> None:
    """A missing encoder and leftovers of training do not count as another auto-encoder."""
    vae, file = AutoencoderKLWan(**WAN, **LATENTS), tmp_path / "whole.safetensors"
    vae.save_pretrained(tmp_path / "vae")
    decoder = {name: x.contiguous() for name, x in as_wan_has_it(vae.state_dict()).items() if "encoder" not in name}
    save_file({f"vae.{name}": x for name, x in decoder.items()} | {"vae.loss.logvar": torch.ones(1)}, file)
    check_auto_encoder(AutoencoderKLWan, file, tmp_path / "vae")
    other = as_wan22_has_it(AUTO_ENCODERS["wan 2.2"][1]().state_dict())
    save_file({f"vae.{name}": x.contiguous() for name, x in other.items()}, file := tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="has another auto-encoder than the AutoencoderKLWan of its base"):
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
    """Only one part is read from a file with all parts; the others come from their folders."""
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
