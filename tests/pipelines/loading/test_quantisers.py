"""Quantised folders are read by their library, and refused in one line without its package."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import BitsAndBytesConfig, PixArtTransformer2DModel, TorchAoConfig, ZImageTransformer2DModel
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig as EncoderBitsAndBytesConfig
from transformers import Qwen3Model
from transformers import TorchAoConfig as EncoderConfig

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.preconditions import weight_problems
from tests.pipelines.support.checkpoints import tiny_models, tiny_whole


@pytest.fixture(scope="module")
def plain(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


@pytest.fixture(scope="module")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model with transformer and text encoder in torchao's int8."""
    torchao: Any = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    configs = {
        "transformer": TorchAoConfig(torchao.Int8WeightOnlyConfig()),
        "text_encoder": EncoderConfig(torchao.Int8WeightOnlyConfig()),
    }
    return written(plain, tmp_path_factory.mktemp("torchao") / "model", configs, dtype=torch.float32)


def written(plain: Path, folder: Path, configs: Mapping[str, Any], **settings: Any) -> Path:
    """Return ``folder``, with the model in ``plain`` whose parts are quantised by ``configs``."""
    kinds: dict[str, Any] = {"transformer": ZImageTransformer2DModel, "text_encoder": Qwen3Model}
    shutil.copytree(plain, folder)
    for part, config in configs.items():
        model = kinds[part].from_pretrained(plain / part, quantization_config=config, **settings)
        shutil.rmtree(folder / part)
        model.save_pretrained(folder / part)
    return folder


def test_a_transformer_computes_with_the_values_that_it_stands_for(plain: Path, quantised: Path) -> None:
    model = Checkpoint(quantised, "cpu", torch.float32).denoiser()
    branch, (module,) = model.probe()[0], model.modules.values()
    assert {type(x.data) for x in module.parameters()} == {torch.Tensor}
    own: Any = ZImageTransformer2DModel
    reference = own.from_pretrained(quantised / "transformer", torch_dtype=torch.float32)
    assert {type(x.data).__name__ for x in reference.parameters()} == {"Tensor", "Int8Tensor"}
    mine = model.forward(module, branch.arguments)
    assert relative_difference(mine, model.forward(reference, branch.arguments)) < 1e-5
    (exact,) = Checkpoint(plain, "cpu", torch.float32).denoiser().modules.values()
    assert 1e-4 < relative_difference(mine, model.forward(exact, branch.arguments)) < 0.1


def test_an_encoder_stays_quantised(plain: Path, quantised: Path) -> None:
    folders = {
        name: Checkpoint(folder, "cpu", torch.float32) for name, folder in (("own", quantised), ("plain", plain))
    }
    request = folders["own"].defaults.request()
    mine, exact = (
        dict(folders[name].text_encoder().encode(request).values)["prompt_embeds"][0] for name in ("own", "plain")
    )
    assert 1e-4 < relative_difference(mine, exact) < 0.1


def test_a_gang_that_quantises_reads_the_same_values(quantised: Path) -> None:
    states = [
        dict(next(iter(Checkpoint(quantised).denoiser(quantised=again).modules.values())).state_dict())
        for again in (False, True)
    ]
    assert all(weight.equal(states[1][name]) for name, weight in states[0].items())


def test_parts_of_a_pipeline_without_blocks_stay_quantised(tmp_path: Path) -> None:
    """The pipeline runs as loaded by the user."""
    torchao: Any = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    folder = tiny_whole.pixart_sigma(tmp_path / "model")
    settings = {"quantization_config": TorchAoConfig(torchao.Int8WeightOnlyConfig()), "dtype": torch.float32}
    kind: Any = PixArtTransformer2DModel
    model = kind.from_pretrained(folder / "transformer", **settings)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")
    checkpoint = Checkpoint(folder, "cpu", torch.float32)
    loaded = checkpoint.denoiser().modules["transformer"]
    assert {type(x.data).__name__ for x in loaded.parameters()} == {"Tensor", "Int8Tensor"}
    assert not [*weight_problems(checkpoint)]


def test_an_estimate_counts_what_a_rank_holds(plain: Path, quantised: Path) -> None:
    sizes = [Checkpoint.of_configuration(str(folder)).weights_bytes() for folder in (plain, quantised)]
    assert sizes[0] == sizes[1]


def test_slices_of_it_are_refused(quantised: Path) -> None:
    with pytest.raises(ValueError, match="has weights of torchao, which are read whole: say load: whole"):
        Checkpoint(quantised).denoiser(sliced=True)


@pytest.mark.parametrize("quantiser", ["bitsandbytes", "torchao"])
def test_a_missing_package_is_named_before_anything_starts(quantiser: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": quantiser}}))
    said = f"transformer is quantised by {quantiser}, whose package is missing: pip install {quantiser}"
    with patch("pipelines.directory.find_spec", lambda name: None):
        (problem,) = weight_problems(Checkpoint(folder))
        assert problem.endswith(said)
        with pytest.raises(ValueError, match=said):
            Checkpoint(folder).denoiser()


def quantised_by(quantiser: object, plain: Path, folder: Path, part: str) -> Path:
    """Return a copy of a model with one part marked as quantised."""
    shutil.copytree(plain, folder)
    file = folder / part / "config.json"
    written = {"quantization_config": {} if quantiser is None else {"quant_method": quantiser, "bits": 4}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **written}))
    return folder


@pytest.mark.parametrize(
    ("part", "quantiser", "also_known"),
    [("transformer", "svdquant", ()), ("transformer", "nunchaku_lite", ()), ("text_encoder", "svdquant", ("gptq",))],
)
def test_an_unknown_quantiser_is_named_before_anything_starts(
    part: str, quantiser: str, also_known: tuple[str, ...], plain: Path, tmp_path: Path
) -> None:
    folder = quantised_by(quantiser, plain, tmp_path / "model", part)
    (problem,) = weight_problems(Checkpoint(folder))
    for said in (
        f"{part} is quantised by {quantiser}, which is not known here",
        "bitsandbytes (pip install bitsandbytes)",
        "torchao (pip install torchao)",
        *also_known,
    ):
        assert said in problem
    load = Checkpoint(folder).denoiser if part == "transformer" else lambda: encoded(folder)
    with pytest.raises(ValueError, match=f"is quantised by {quantiser}, which is not known here"):
        load()


def encoded(folder: Path) -> Any:
    checkpoint = Checkpoint(folder)
    return checkpoint.text_encoder().encode(checkpoint.defaults.request())


def test_encoders_of_other_quantisers_are_left_to_transformers(plain: Path, tmp_path: Path) -> None:
    folder = quantised_by("gptq", plain, tmp_path / "model", "text_encoder")
    assert not [*weight_problems(Checkpoint(folder))]


def test_a_file_that_nunchaku_has_quantised_is_refused(plain: Path, tmp_path: Path) -> None:
    """The metadata names the quantiser; the tensors have unknown names."""
    file = tmp_path / "svdq-int4_r32.safetensors"
    written = json.dumps({"method": "svdquant", "rank": 32, "weight": {"dtype": "int4", "group_size": 64}})
    save_file({"layers.0.qweight": torch.zeros(4, 4, dtype=torch.int8)}, file, {"quantization_config": written})
    checkpoint = Checkpoint.open(f"{file}@{plain}")
    said = rf"{file.name} is quantised by svdquant, which is not known here: take weights of bitsandbytes \(pip"
    (problem,) = weight_problems(checkpoint)
    assert re.search(said, problem)
    with pytest.raises(ValueError, match=said):
        checkpoint.denoiser()


BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
"""Settings of bitsandbytes' configurations."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_folders_of_bitsandbytes(name: str, plain: Path, tmp_path: Path, gpu_device: str) -> None:
    """Only a GPU reads them. The transformer uses the values that the library multiplies by."""
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    configs = {
        "transformer": BitsAndBytesConfig(**BITSANDBYTES[name]),
        "text_encoder": EncoderBitsAndBytesConfig(**BITSANDBYTES[name]),
    }
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": gpu_device}}
    folder = written(plain, tmp_path / "model", configs, **settings)
    own, exact = (Checkpoint(one, gpu_device, torch.bfloat16) for one in (folder, plain))
    assert not [*weight_problems(own)]
    model, (unquantised,) = own.denoiser(), exact.denoiser().modules.values()
    branch, (module,) = model.probe()[0], model.modules.values()
    assert {(type(x.data), x.dtype.itemsize > 1) for x in module.parameters()} == {(torch.Tensor, True)}
    kind: Any = ZImageTransformer2DModel
    reference = kind.from_pretrained(folder / "transformer", **settings)
    assert {x.dtype for x in reference.parameters()} & {torch.uint8, torch.int8}
    mine = model.forward(module, branch.arguments)
    assert relative_difference(mine, model.forward(reference, branch.arguments)) < 0.05
    assert 1e-3 < relative_difference(mine, model.forward(unquantised, branch.arguments)) < 0.5
    request = own.defaults.request()
    encodings = [dict(one.text_encoder().encode(request).values)["prompt_embeds"][0] for one in (own, exact)]
    assert 1e-3 < relative_difference(*encodings) < 0.5
