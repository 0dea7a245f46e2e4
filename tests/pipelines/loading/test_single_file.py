"""A transformer in one file, in diffusers' or original names, with a base folder for the rest."""

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
from safetensors.torch import load_file, save_file
from torch import Tensor

from deployments.model_config import ModelConfig
from pipelines import single_file
from pipelines.checkpoint import Checkpoint
from pipelines.single_file import OWN, PART_PREFIXES, split_source
from tests.pipelines.support.checkpoints import tiny, tiny_models, tiny_unknown, tiny_video
from tests.pipelines.support.checkpoints.parts import shifted_auto_encoder

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
    """Return weights that differ from the folder's."""
    return {name: weight + 0.125 for name, weight in load_file(base / WEIGHTS).items()}


def as_its_makers_have_it(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in original names, with queries, keys and values joined."""
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
    base: Path, tuned: dict[str, Tensor], written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outline, outlines = single_file._outline, list[Any]()
    monkeypatch.setattr(single_file, "_outline", lambda *given: outlines.append(given) or outline(*given))  # type: ignore[func-returns-value]
    file = tmp_path / "tuned.safetensors"
    save_file(written(tuned), file)
    read = weights_of(f"{file}@{base}")
    assert len(outlines) == 1, "names are checked with the model that is filled"
    assert set(read) == set(tuned)
    for name, weight in tuned.items():
        torch.testing.assert_close(read[name], weight)
    assert not torch.equal(weights_of(str(base))["cap_pad_token"], tuned["cap_pad_token"])


@pytest.mark.parametrize(
    "make", [tiny_models.qwen_image, tiny_models.flux2_klein, tiny.wan], ids=["qwen", "klein", "wan"]
)
def test_files_with_all_parts_of_any_model(folders: Callable[[Any], Path], tmp_path: Path, make: Any) -> None:
    """ComfyUI saves models with this prefix, which diffusers does not always translate."""
    base, file = folders(make), tmp_path / "all.safetensors"
    tuned = {name: weight + 0.125 for name, weight in load_file(base / WEIGHTS).items()}
    save_file({f"model.diffusion_model.{name}": x for name, x in tuned.items()} | {"vae.x": torch.ones(1)}, file)
    read = weights_of(f"{file}@{base}")
    assert all(torch.equal(read[name], weight) for name, weight in tuned.items())


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
    (tmp_path / "tuned.ckpt").touch()
    for source in (f"{tmp_path}/tuned.ckpt", f"{tmp_path}/tuned.ckpt@flux-shapes"):
        with pytest.raises(ValueError, match=r"tuned\.ckpt is a file, and only \.safetensors or \.gguf files are read"):
            Checkpoint.open(source)


def test_another_models_file_is_an_error(base: Path, tuned: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({name: weight for name, weight in tuned.items() if "layers.1" not in name}, file)
    with pytest.raises(ValueError, match=r"other.safetensors is not exactly the ZImageTransformer2DModel that"):
        Checkpoint.open(f"{file}@{base}").denoiser()
    with pytest.raises(ValueError, match="is not exactly the FluxTransformer2DModel that"):
        Checkpoint.open(f"{file}@{tiny.flux(tmp_path / 'flux')}").denoiser()


def test_what_cannot_be_read_so_is_an_error(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.safetensors"
    file.touch()
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
    """The file has a whole pipeline, or a tensor that diffusers' translation removes by name."""
    file = tmp_path / "whole.safetensors"
    more = ("first_stage_model.decoder.conv_in.weight", "model_ema.decay", "model.diffusion_model.norm_final.weight")
    save_file(as_its_makers_have_it(tuned) | {name: torch.ones(1) for name in more}, file)
    torch.testing.assert_close(weights_of(f"{file}@{base}")["cap_pad_token"], tuned["cap_pad_token"])


@pytest.mark.parametrize("written", [dict, as_its_makers_have_it], ids=["diffusers' names", "its makers' names"])
def test_a_key_that_nothing_reads_is_named(base: Path, tuned: dict[str, Tensor], written: Any, tmp_path: Path) -> None:
    file, tensors = tmp_path / "more.safetensors", written(tuned)
    key = next(name for name in tensors if name.endswith("feed_forward.w1.weight")).replace("w1", "w4")
    save_file(tensors | {key: torch.ones(1)}, file)
    with pytest.raises(ValueError, match=rf"has no place for {key.removeprefix('model.diffusion_model.')}"):
        Checkpoint.open(f"{file}@{base}").denoiser()


VAE_NAMES = {
    r"(en|de)coder\.mid_block\.resnets\.0": r"\1coder.mid.block_1",
    r"(en|de)coder\.mid_block\.resnets\.1": r"\1coder.mid.block_2",
    r"(en|de)coder\.mid_block\.attentions\.0": r"\1coder.mid.attn_1",
    r"encoder\.down_blocks\.(\d)\.resnets\.(\d)": r"encoder.down.\1.block.\2",
    r"encoder\.down_blocks\.(\d)\.downsamplers\.0": r"encoder.down.\1.downsample",
    r"attn_1\.group_norm": "attn_1.norm",
    r"attn_1\.to_out\.0": "attn_1.proj_out",
    r"attn_1\.to_(q|k|v)": r"attn_1.\1",
    "conv_shortcut": "nin_shortcut",
    "conv_norm_out": "norm_out",
}
CLIP_NAMES = {
    r"^(text_model\.)?embeddings\.token_embedding\.weight": "token_embedding.weight",
    r"^(text_model\.)?embeddings\.position_embedding\.weight": "positional_embedding",
    r"^(text_model\.)?final_layer_norm": "ln_final",
    r"^(text_model\.)?encoder\.layers\.(\d)": r"transformer.resblocks.\2",
    r"layer_norm(\d)": r"ln_\1",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"self_attn\.out_proj": "attn.out_proj",
    r"text_projection\.weight": "text_projection",
}
NUM_UP = 3
"""Stages of the tiny auto-encoder's decoder; original names count from the other end."""


def renamed(name: str, names: Mapping[str, str]) -> str:
    for own, theirs in names.items():
        name = re.sub(own, theirs, name)
    return name


def as_stability_has_it(vae: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def place(found: re.Match[str]) -> str:
        kind = {"resnets": f"block.{found[3]}", "upsamplers": "upsample"}[found[2]]
        return f"decoder.up.{NUM_UP - 1 - int(found[1])}.{kind}"

    written: dict[str, Tensor] = {}
    for name, x in vae.items():
        name = re.sub(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)", place, renamed(name, VAE_NAMES))
        is_linear = "attn_1" in name and name.endswith(".weight") and x.ndim == 2
        written[f"first_stage_model.{name}"] = x[:, :, None, None] if is_linear else x
    return written


def as_open_clip_has_it(encoder: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return OpenCLIP's layout: joined queries, keys and values, transposed projection."""
    written: dict[str, Tensor] = {}
    for name, x in encoder.items():
        theirs = renamed(name, CLIP_NAMES)
        if ".self_attn.q_proj." in name:
            three = torch.cat([encoder[name.replace("q_proj", f"{one}_proj")] for one in "qkv"])
            theirs = theirs.replace("self_attn.q_proj.", "attn.in_proj_")
            written[f"conditioner.embedders.1.model.{theirs}"] = three
        elif "k_proj" not in name and "v_proj" not in name:
            written[f"conditioner.embedders.1.model.{theirs}"] = x.T.contiguous() if theirs == "text_projection" else x
    return written


def all_parts(base: Path, change: float) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return a Stable Diffusion XL file whose parts all differ from the base's, and the parts."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        (file,) = (base / name).glob("*.safetensors")
        parts[name] = {key: x + change for key, x in load_file(file).items() if x.is_floating_point()}
    prefix = "conditioner.embedders.0.transformer.text_model."
    first = {prefix + key.removeprefix("text_model."): x for key, x in parts["text_encoder"].items()}
    first["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(4)[None]
    second = as_open_clip_has_it(parts["text_encoder_2"]) | {
        "conditioner.embedders.1.model.logit_scale": torch.ones(())
    }
    return parts["unet"] | as_stability_has_it(parts["vae"]) | first | second, parts


def test_all_parts_of_a_file_with_a_u_net_are_read(folders: Callable[[Any], Path], tmp_path: Path) -> None:
    """Fine-tuned Stable Diffusion XL files include fine-tuned text encoders, which must be used."""
    base, file = folders(tiny_unknown.sdxl), tmp_path / "all.safetensors"
    written, parts = all_parts(base, 0.125)
    save_file(written, file)
    checkpoint = Checkpoint.open(f"{file}@{base}", "cpu", torch.float32)
    encoders, decoder = checkpoint.text_encoder()._pipeline, checkpoint.decoder()._pipeline
    (unet,) = checkpoint.denoiser().modules.values()
    models = {"unet": unet, "vae": decoder.vae}
    models |= {name: getattr(encoders, name) for name in ("text_encoder", "text_encoder_2")}
    for name, model in models.items():
        read = model.state_dict()
        assert {key for key, x in read.items() if x.is_floating_point()} == parts[name].keys()
        for key, x in parts[name].items():
            assert torch.equal(read[key], x), (name, key)


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("fault", ["missing", "unread"])
def test_parts_that_are_not_whole_are_refused(
    folders: Callable[[Any], Path], tmp_path: Path, part: str, fault: str
) -> None:
    base, file = folders(tiny_unknown.sdxl), tmp_path / "all.safetensors"
    written, _ = all_parts(base, 0.125)
    key = next(key for key in sorted(written) if key.startswith(PART_PREFIXES[part]) and key.endswith(".bias"))
    if fault == "missing":
        del written[key]
    else:
        written[key.replace(".bias", ".more")] = torch.ones(3)
    save_file(written, file)
    checkpoint = Checkpoint.open(f"{file}@{base}", "cpu", torch.float32)
    with pytest.raises(ValueError, match=rf"has no {part} like the \w+ that .*(it lacks|has no place for)"):
        checkpoint.decoder()._pipeline if part == "vae" else checkpoint.text_encoder()._pipeline


VELOCITY, EDM = {"prediction_type": "v_prediction"}, {"_class_name": "EDMEulerScheduler"}


@pytest.mark.parametrize(
    ("keys", "header", "settings"),
    [
        (["v_pred"], {}, VELOCITY),
        (["ztsnr"], {}, {"rescale_betas_zero_snr": True}),
        ([], {"modelspec.prediction_type": "v"}, VELOCITY),
        ([], {"modelspec.predict_key": "v"}, VELOCITY),
        (["edm_mean", "edm_std"], {}, EDM),
        (["edm_vpred.sigma_max", "edm_vpred.sigma_min"], {}, EDM),
    ],
)
def test_a_u_net_for_another_scheduler_is_refused(
    folders: Callable[[Any], Path], tmp_path: Path, keys: list[str], header: dict[str, str], settings: dict[str, Any]
) -> None:
    """Files of ComfyUI and kohya's scripts name the training schedule; another one gives noise."""
    base, file = folders(tiny_unknown.sdxl), tmp_path / "tuned.safetensors"
    own = load_file(base / "unet" / "diffusion_pytorch_model.safetensors")
    save_file(own | {key: torch.zeros(0) for key in keys}, file, header)
    with pytest.raises(ValueError, match=rf"was trained with \{{'{next(iter(settings))}'"):
        Checkpoint.open(f"{file}@{base}", "cpu", torch.float32).denoiser()
    fitting = shutil.copytree(base, tmp_path / "base")
    config = fitting / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    assert Checkpoint.open(f"{file}@{fitting}", "cpu", torch.float32).denoiser().modules


@pytest.mark.parametrize("prefix", ["vae.", "first_stage_model."])
@pytest.mark.parametrize("is_other", [False, True])
def test_a_file_of_a_model_with_another_auto_encoder_is_refused(
    base: Path, tuned: dict[str, Tensor], tmp_path: Path, prefix: str, is_other: bool
) -> None:
    """Otherwise the base's auto-encoder would be used unnoticed: LTX-Video's releases differ in it."""
    own = load_file(next((base / "vae").glob("*.safetensors")))
    vae = as_stability_has_it(shifted_auto_encoder(8, 3).state_dict() if is_other else own)
    theirs = {name.replace("first_stage_model.", prefix): x.contiguous() for name, x in vae.items()}
    save_file(as_its_makers_have_it(tuned) | theirs, tmp_path / "whole.safetensors")
    source = f"{tmp_path / 'whole.safetensors'}@{base}"
    if is_other:
        with pytest.raises(
            ValueError, match=r"whole\.safetensors has another auto-encoder than the AutoencoderKL of its base"
        ):
            weights_of(source)
    else:
        assert torch.equal(weights_of(source)["cap_pad_token"], tuned["cap_pad_token"])


def test_parts_that_come_from_the_base_are_told(
    base: Path, tuned: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "whole.safetensors"
    more = ["vae.conv.weight", "text_encoders.x", "clip_vision.x", OWN + "video_embeddings_connector.x", "model_ema.x"]
    more += ["alphas_cumprod"]  # recomputed values
    save_file(as_its_makers_have_it(tuned) | {name: torch.ones(1) for name in more}, file)
    with caplog.at_level(logging.WARNING):
        weights_of(f"{file}@{base}")
        others = "clip_vision, text_encoders, vae, video_embeddings_connector"
        assert f"{file} also has {others}, which are not read: these parts are those of {base}" in caplog.text
        caplog.clear()
        save_file(as_its_makers_have_it(tuned), file)
        weights_of(f"{file}@{base}")
    assert "also has" not in caplog.text, "the file was replaced under its path"
