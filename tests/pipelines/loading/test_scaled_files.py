"""Eight-bit weights with a scale beside them are read as what they stand for, from every layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from tests.pipelines.loading.test_single_file import as_its_makers_have_it
from tests.pipelines.support.checkpoints import tiny_models
from tests.pipelines.support.checkpoints.damage import Tensors, by_hand, changed, scaled

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "scale_weight": (".scale_weight", {}),
    "weight_scale": (".weight_scale", {}),
    "by row": (".weight_scale", {"by_row": True}),
    "e5m2": (".scale_weight", {"dtype": torch.float8_e5m2}),
    "int8 by row": (".weight_scale", {"by_row": True, "dtype": torch.int8}),
}


@pytest.fixture(scope="module")
def base(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


def marked(tensors: Tensors) -> Tensors:
    """With the keys that say something of activations and of the file."""
    layers = [name.removesuffix(".scale_weight") for name in tensors if name.endswith(".scale_weight")]
    inputs = {f"{layer}.scale_input": torch.ones(()) for layer in layers}
    return tensors | inputs | {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}


def whole(folder: Path) -> Tensors:
    (module,) = Checkpoint(folder).denoiser().modules.values()
    return dict(module.state_dict())


def sliced(folder: Path) -> Tensors:
    model = Checkpoint(folder).denoiser(sliced=True)
    ((name, module),) = model.modules.items()
    assert model.weights is not None
    model.weights.fill(name, module, {})
    return dict(module.state_dict())


def in_one_file(folder: Path) -> Tensors:
    file = folder / "one.safetensors"
    shutil.copy(folder / WEIGHTS, file)
    (module,) = Checkpoint.open(f"{file}@{folder}").denoiser().modules.values()
    return dict(module.state_dict())


LAYOUTS = {"folder": whole, "slices": sliced, "file": in_one_file}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("written", FORMATS)
def test_a_transformer_is_what_its_file_stands_for(base: Path, tmp_path: Path, written: str, layout: str) -> None:
    ending, how = FORMATS[written]
    folder = changed(base, "transformer", tmp_path / "scaled", lambda x: marked(scaled(x, ending, **how)))
    expected = by_hand(scaled(load_file(base / WEIGHTS), ending, **how), ending)
    read = LAYOUTS[layout](folder)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], x) for name, x in expected.items())


def test_its_makers_names_too(base: Path, tmp_path: Path) -> None:
    """Queries, keys and values are one weight there, with one scale."""
    makers = as_its_makers_have_it(load_file(base / WEIGHTS))
    save_file(scaled(makers, ".scale_weight"), tmp_path / "one.safetensors")
    (module,) = Checkpoint.open(f"{tmp_path / 'one.safetensors'}@{base}").denoiser().modules.values()
    expected = by_hand(scaled(makers, ".scale_weight"), ".scale_weight")
    three = torch.cat([module.state_dict()[f"layers.0.attention.to_{one}.weight"] for one in "qkv"])
    assert torch.equal(three, expected["model.diffusion_model.layers.0.attention.qkv.weight"])


def encoder(folder: Path) -> Tensors:
    return dict(Checkpoint(folder).text_encoder()._pipeline.text_encoder.state_dict())


def auto_encoder(folder: Path) -> Tensors:
    return dict(Checkpoint(folder).decoder()._pipeline.vae.state_dict())


def test_an_auto_encoder_is_what_its_file_stands_for(base: Path, tmp_path: Path) -> None:
    """Only the layers of its attention are scaled; there are some."""
    folder = changed(base, "vae", tmp_path / "scaled", lambda x: marked(scaled(x, ".scale_weight")))
    (file,) = (base / "vae").glob("*.safetensors")
    written = scaled(load_file(file), ".scale_weight")
    assert sum(x.dtype == torch.float8_e4m3fn for x in written.values()) >= 4
    expected, read = by_hand(written, ".scale_weight"), auto_encoder(folder)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], x) for name, x in expected.items())


@pytest.mark.parametrize("part", ["text_encoder", "transformer"])
def test_a_scale_may_lie_in_another_shard(base: Path, tmp_path: Path, part: str) -> None:
    folder = changed(base, part, tmp_path / "scaled", lambda x: marked(scaled(x, ".scale_weight")))
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    shards = {"one.safetensors": False, "two.safetensors": True}
    for name, has_scales in shards.items():
        held = {key: x for key, x in tensors.items() if ("scale" in key) == has_scales}
        save_file(held, folder / part / name, metadata={"format": "pt"})
    places = {key: "two.safetensors" if "scale" in key else "one.safetensors" for key in tensors}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    file.unlink()
    (whole_file,) = (base / part).glob("*.safetensors")
    expected = by_hand(scaled(load_file(whole_file), ".scale_weight"), ".scale_weight")
    read = [encoder(folder)] if part == "text_encoder" else [whole(folder), sliced(folder)]
    for one in read:
        assert all(torch.equal(one[name], x) for name, x in expected.items())


def packed(tensors: Tensors) -> Tensors:
    halves = {name: x.view(torch.uint8) for name, x in tensors.items() if x.dtype == torch.float8_e4m3fn}
    return tensors | halves


def with_format(written: Any, tensors: Tensors) -> Tensors:
    name = next(name for name in tensors if name.endswith(".weight_scale")).removesuffix(".weight_scale")
    return tensors | {f"{name}.comfy_quant": torch.tensor(list(json.dumps(written).encode()), dtype=torch.uint8)}


def in_blocks(tensors: Tensors) -> Tensors:
    return {name: torch.ones(2, 2) if name.endswith(".weight_scale") else x for name, x in tensors.items()}


def with_second_scale(tensors: Tensors) -> Tensors:
    return tensors | {f"{name}_2": x.clone() for name, x in tensors.items() if name.endswith(".weight_scale")}


UNKNOWN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "packed": (packed, "is packed as torch.uint8, and only fp8 and int8"),
    "another format": (partial(with_format, {"format": "nvfp4"}), r"'nvfp4'.*only float8_e4m3fn and float8_e5m2 are"),
    "blocks": (in_blocks, r"with a scale of \(2, 2\); a scale is one number, or one for each row"),
    "a second scale": (with_second_scale, r"no place for .*weight_scale_2|Unexpected key.*weight_scale_2"),
}


@pytest.mark.parametrize("layout", ["folder", "slices", "file"])
@pytest.mark.parametrize("fault", UNKNOWN)
def test_other_formats_are_refused(base: Path, tmp_path: Path, fault: str, layout: str) -> None:
    change, message = UNKNOWN[fault]
    folder = changed(base, "transformer", tmp_path / "scaled", lambda x: change(scaled(x, ".weight_scale")))
    with pytest.raises(ValueError, match=message):
        LAYOUTS[layout](folder)


def test_a_format_that_is_read_may_be_named(base: Path, tmp_path: Path) -> None:
    change = partial(with_format, {"format": "float8_e4m3fn"})
    folder = changed(base, "transformer", tmp_path / "scaled", lambda x: change(scaled(x, ".weight_scale")))
    expected = by_hand(scaled(load_file(base / WEIGHTS), ".weight_scale"), ".weight_scale")
    for read in (whole(folder), sliced(folder), in_one_file(folder)):
        assert all(torch.equal(read[name], x) for name, x in expected.items())


def test_rows_of_a_scale_follow_the_rows_of_a_weight(base: Path, tmp_path: Path) -> None:
    """A rank that reads some rows, or some columns, gets what the whole weight has there."""
    from engines.parallel.weight_files import Slice, WeightFiles

    folder = changed(base, "transformer", tmp_path / "scaled", lambda x: scaled(x, ".weight_scale", by_row=True))
    name = "layers.0.attention.to_q.weight"
    weight = by_hand(scaled(load_file(base / WEIGHTS), ".weight_scale", by_row=True), ".weight_scale")[name]
    source = WeightFiles(folders={"transformer": folder / "transformer"}, device=torch.device("cpu"))
    ranges = ((1, 3), (5, 9))
    for dim in (0, 1):
        expected: Tensor = torch.cat([weight.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        layer = torch.nn.Linear(expected.shape[1], expected.shape[0], bias=False, device="meta")
        source.fill("transformer", layer, {"weight": Slice(name=name, dim=dim, ranges=ranges)})
        assert torch.equal(layer.weight, expected)
