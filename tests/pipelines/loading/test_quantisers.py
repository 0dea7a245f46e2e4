"""Folders that a library's quantiser wrote: read by the library, and refused in one line without its package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import PixArtTransformer2DModel, TorchAoConfig, ZImageTransformer2DModel
from transformers import Qwen3Model
from transformers import TorchAoConfig as EncoderConfig

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.preconditions import weight_problems
from tests.pipelines.support.checkpoints import tiny_models, tiny_whole


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.z_image(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, its transformer and text encoder in torchao's int8."""
    torchao: Any = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    folder = tmp_path_factory.mktemp("torchao") / "model"
    shutil.copytree(plain, folder)
    classes: tuple[tuple[str, Any, Any], ...] = (
        ("transformer", ZImageTransformer2DModel, TorchAoConfig),
        ("text_encoder", Qwen3Model, EncoderConfig),
    )
    for part, kind, config in classes:
        settings = {"quantization_config": config(torchao.Int8WeightOnlyConfig()), "dtype": torch.float32}
        model = kind.from_pretrained(plain / part, **settings)
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
    """It runs as a user loads it."""
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
