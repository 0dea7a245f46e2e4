"""Missing tensors, unused tensors and values that are not finite are errors for every part."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines import gpu_weights
from pipelines.checkpoint import Checkpoint
from pipelines.directory import CLASSIC_INDEX
from pipelines.preconditions import weight_problems
from tests.pipelines.support.checkpoints import tiny_models, tiny_others, tiny_whole
from tests.pipelines.support.checkpoints.damage import Tensors, changed

LOAD: dict[str, Callable[[Checkpoint], Any]] = {
    "text_encoder": lambda checkpoint: checkpoint.text_encoder(),
    "transformer": lambda checkpoint: checkpoint.denoiser(),
    "vae": lambda checkpoint: checkpoint.decoder(),
}
SLICED = "transformer, sliced"
PARTS = [*LOAD, SLICED]


@pytest.fixture(scope="module")
def base(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


@pytest.fixture(scope="module")
def called(folders: Callable[[Any], Path]) -> Path:
    """Return a pipeline without blocks, which runs by its own call."""
    return folders(tiny_whole.sana)


def load(part: str, folder: Path) -> Any:
    if part != SLICED:
        return LOAD[part](Checkpoint(folder))
    model = Checkpoint(folder).denoiser(sliced=True)
    assert model.weights is not None
    for name, module in model.modules.items():
        model.weights.fill(name, module, {})
    return model


def a_weight(tensors: Tensors) -> str:
    return next(name for name, x in tensors.items() if name.endswith(".weight") and x.ndim > 1)


def without_one(tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if name != a_weight(tensors)}


def with_another(tensors: Tensors) -> Tensors:
    return tensors | {f"{a_weight(tensors).removesuffix('.weight')}.zero_point": torch.zeros(1)}


def with_another_shape(tensors: Tensors) -> Tensors:
    name = a_weight(tensors)
    return tensors | {name: tensors[name][:-1].contiguous()}


def with_nan(tensors: Tensors) -> Tensors:
    name = a_weight(tensors)
    return tensors | {name: tensors[name].clone().index_fill_(0, torch.tensor([0]), torch.nan)}


def with_infinity(tensors: Tensors) -> Tensors:
    name = a_weight(tensors)
    return tensors | {name: tensors[name].clone().index_fill_(0, torch.tensor([0]), -torch.inf)}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (without_one, "{name}"),
    "unread": (with_another, "no place for {layer}.zero_point"),
    "shape": (with_another_shape, "{name}"),
    "NaN": (with_nan, "model.safetensors has values that are not finite in {name}"),
    "infinity": (with_infinity, "model.safetensors has values that are not finite in {name}"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_part_is_told_with_the_tensors_name(base: Path, tmp_path: Path, part: str, fault: str) -> None:
    change, message = FAULTS[fault]
    named: list[str] = []

    def remembered(tensors: Tensors) -> Tensors:
        named.append(a_weight(tensors))
        return change(tensors)

    folder = changed(base, part.split(",")[0], tmp_path / "damaged", remembered)
    (name,) = named
    told = re.escape(message.format(name=name, layer=name.removesuffix(".weight")))
    with pytest.raises(ValueError, match=rf"damaged.*{told}"):
        load(part, folder)


@pytest.mark.parametrize("part", ["text_encoder", "transformer"])
@pytest.mark.parametrize("fault", ["missing", "unread", "NaN", "shape"])
def test_a_damaged_part_of_a_pipeline_without_blocks_is_told(
    called: Path, tmp_path: Path, part: str, fault: str
) -> None:
    """The error comes at start, or before it where file headers show the fault."""
    change, message = FAULTS[fault]
    name = a_weight(load_file(next((called / part).glob("*.safetensors"))))
    checkpoint = Checkpoint(changed(called, part, tmp_path / "damaged", change))
    told = rf"damaged/{part}.*" + re.escape(message.format(name=name, layer=name.removesuffix(".weight")))
    with pytest.raises(ValueError, match=told):
        checkpoint.denoiser()
    problems = [*weight_problems(checkpoint)]
    assert [bool(re.search(told, problem)) for problem in problems] == ([] if fault == "NaN" else [True])


def test_no_problem_is_told_of_a_sound_pipeline_without_blocks(called: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert [*weight_problems(Checkpoint(called))] == []
    assert capfd.readouterr().err == ""


def test_a_class_that_no_library_has_is_told(called: Path, tmp_path: Path) -> None:
    folder = changed(called, "vae", tmp_path / "model", dict)
    index = folder / CLASSIC_INDEX
    index.write_text(index.read_text().replace("AutoencoderDC", "AutoencoderOfTomorrow"))
    with pytest.raises(ValueError, match=r"model/vae needs AutoencoderOfTomorrow, which this diffusers lacks"):
        Checkpoint(folder).denoiser()


def test_a_head_that_an_encoder_goes_without_is_no_loss(base: Path, tmp_path: Path) -> None:
    """Some encoders are published as whole language models, or with their vision tower."""
    others = {"lm_head.weight": torch.zeros(4, 4), "visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4)}
    load("text_encoder", changed(base, "text_encoder", tmp_path / "more", lambda tensors: tensors | others))


@pytest.mark.parametrize("key", ["layers.0.mlp.up_proj.weight_scale_inv", "layers.7.mlp.up_proj.weight"])
def test_keys_of_a_whole_language_model_belong_to_its_layers(base: Path, tmp_path: Path, key: str) -> None:
    """Block scales (Qwen's fp8 files) and surplus layers under the whole model's prefix must be errors."""

    def as_published(tensors: Tensors) -> Tensors:
        assert not any(name.startswith("model.") for name in tensors)
        return {f"model.{name}": x for name, x in (tensors | {key: torch.ones(1, 1)}).items()}

    with pytest.raises(ValueError, match=rf"has no place for model\.{re.escape(key)}"):
        load("text_encoder", changed(base, "text_encoder", tmp_path / "more", as_published))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_encoder_is_told_where_it_is_read_as_on_gpus(
    base: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.component_weights.FAST_DEVICES", ("cpu",))
    reader = Mock(wraps=gpu_weights.read_tensors)
    monkeypatch.setattr(gpu_weights, "read_tensors", reader)
    test_a_damaged_part_is_told_with_the_tensors_name(base, tmp_path, "text_encoder", fault)
    assert reader.call_count == 1


def test_a_truncated_encoder_is_told_where_it_is_read_as_on_gpus(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.component_weights.FAST_DEVICES", ("cpu",))
    folder = changed(base, "text_encoder", tmp_path / "cut", dict)
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cut/text_encoder.*not the whole of one"):
        load("text_encoder", folder)


def test_what_is_tied_need_not_be_in_a_file(tmp_path: Path) -> None:
    """T5's embedding is saved once and used under two names."""
    from tests.pipelines.support.checkpoints import tiny

    folder = tiny.flux(tmp_path / "flux")
    encoder = Checkpoint(folder).text_encoder()._pipeline.text_encoder_2
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


def test_a_file_that_is_none_is_told(base: Path, tmp_path: Path) -> None:
    for part in PARTS:
        folder = changed(base, part.split(",")[0], tmp_path / part, dict)
        (file,) = (folder / part.split(",")[0]).glob("*.safetensors")
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n")
        with pytest.raises(ValueError, match=part.split(",")[0]):
            load(part, folder)


def test_a_rank_that_reads_its_share_reads_tables_too(tmp_path: Path) -> None:
    """SD 3's position table is a buffer that files hold and training does not change."""
    folder = tiny_others.sd3(tmp_path / "base")
    name = "pos_embed.pos_embed"
    other = changed(folder, "transformer", tmp_path / "other", lambda tensors: tensors | {name: tensors[name] + 1})
    model = load(SLICED, other)
    (whole,) = Checkpoint(other).denoiser().modules.values()
    (module,) = model.modules.values()
    assert torch.equal(module.state_dict()[name], whole.state_dict()[name])
    (plain,) = Checkpoint(folder).denoiser().modules.values()
    assert not torch.equal(module.state_dict()[name], plain.state_dict()[name])


def in_half_precision(file: Path, stem: str, change: float) -> Tensors:
    """Write a variant of ``file`` beside it, and return its values."""
    halves = {key: (x + change).half() for key, x in load_file(file).items()}
    save_file(halves, file.with_name(f"{stem}.fp16.safetensors"), {"format": "pt"})
    return halves


def in_shards(file: Path, stem: str, change: float) -> Tensors:
    halves = {key: (x + change).half() for key, x in load_file(file).items()}
    names = {key: f"{stem}.fp16-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(halves)}
    for name in set(names.values()):
        held = {key: x for key, x in halves.items() if names[key] == name}
        save_file(held, file.with_name(name), {"format": "pt"})
    index = {"metadata": {}, "weight_map": names}
    file.with_name(f"{stem}.safetensors.index.fp16.json").write_text(json.dumps(index))
    return halves


@pytest.mark.parametrize("write", [in_half_precision, in_shards])
@pytest.mark.parametrize("part", LOAD)
def test_a_variant_is_read_if_there_is_nothing_else(base: Path, tmp_path: Path, part: str, write: Any) -> None:
    """``hf download --include '*fp16*'`` makes such a folder. Files without a variant take precedence."""
    folder = shutil.copytree(base, tmp_path / "model")
    (file,) = (folder / part).glob("*.safetensors")
    whole, halves = load_file(file), write(file, file.stem, 0.5)
    for expected in (whole, halves):
        checkpoint = Checkpoint(folder, "cpu", torch.float32)
        if part == "transformer":
            (model,) = checkpoint.denoiser().modules.values()
        else:
            model = getattr(LOAD[part](checkpoint)._pipeline, part)
        read = model.state_dict()
        assert all(torch.equal(read[key], x.float()) for key, x in expected.items())
        file.unlink(missing_ok=True)
    shutil.copy(next((folder / part).glob("*fp16*.safetensors")), folder / part / f"{file.stem}.bf16.safetensors")
    with pytest.raises(ValueError, match="has weights of the variants bf16, fp16: keep one of them"):
        load(part, folder)


@pytest.mark.parametrize(("part", "name"), [("vae", "diffusion_pytorch_model"), ("text_encoder", "pytorch_model")])
def test_files_of_pytorch_without_a_variant_precede_a_variant(base: Path, tmp_path: Path, part: str, name: str) -> None:
    folder = shutil.copytree(base, tmp_path / "model")
    (file,) = (folder / part).glob("*.safetensors")
    whole = load_file(file)
    in_half_precision(file, file.stem, 0.5)
    file.unlink()
    torch.save(whole, folder / part / f"{name}.bin")
    read = getattr(LOAD[part](Checkpoint(folder, "cpu", torch.float32))._pipeline, part).state_dict()
    assert all(torch.equal(read[key], x) for key, x in whole.items())
