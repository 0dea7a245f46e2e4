"""Eight-bit weights with scales are read as their real values, from every layout."""

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

from engines.core.tensors import relative_difference
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
    """Return the tensors with keys about activations and the file."""
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
    """Original files join queries, keys and values to one weight with one scale."""
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
    """Only its attention layers are scaled."""
    folder = changed(base, "vae", tmp_path / "scaled", lambda x: marked(scaled(x, ".scale_weight")))
    (file,) = (base / "vae").glob("*.safetensors")
    written = scaled(load_file(file), ".scale_weight")
    assert sum(x.dtype == torch.float8_e4m3fn for x in written.values()) >= 4
    expected, read = by_hand(written, ".scale_weight"), auto_encoder(folder)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], x) for name, x in expected.items())


@pytest.mark.parametrize("part", ["text_encoder", "transformer"])
@pytest.mark.parametrize("is_stale", [False, True], ids=["another shard", "an index without scales"])
def test_a_scale_may_lie_in_another_shard(base: Path, tmp_path: Path, part: str, is_stale: bool) -> None:
    """The index may also be that of the weights before quantisation."""
    folder = changed(base, part, tmp_path / "scaled", lambda x: marked(scaled(x, ".scale_weight")))
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    shards = {"one.safetensors": False, "two.safetensors": True}
    for name, has_scales in shards.items():
        held = {key: x for key, x in tensors.items() if ("scale" in key or is_stale) == has_scales}
        save_file(held, folder / part / name, metadata={"format": "pt"})
    places = {key: "two.safetensors" if "scale" in key or is_stale else "one.safetensors" for key in tensors}
    if is_stale:
        places = {key: file for key, file in places.items() if "scale" not in key}
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
    "another format": (
        partial(with_format, {"format": "svdquant_w4a4"}),
        r"'svdquant_w4a4'.*only float8_e4m3fn, float8_e5m2, int8_tensorwise, nvfp4, mxfp8 are",
    ),
    "other scales": (
        lambda x: {
            key.replace(".weight_scale", ".weight_s_rel"): value
            for key, value in with_format({"format": "asym_w4a8_int8"}, x).items()
        },
        r"comfy_quant says \{'format': 'asym_w4a8_int8'\}, and only|no place for .*weight_s_rel",
    ),
    "blocks": (in_blocks, r"with a scale of \(2, 2\); a scale is one number, or one for each row"),
    "a second scale": (with_second_scale, "weight_scale_2 belongs to nvfp4, which the format of .* is not"),
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


def rotation(group: int) -> Tensor:
    """Return ConvRot's matrix entry by entry: a sign for each base-4 digit of row and column."""
    signs = [
        [
            (-1.0) ** sum(row // 4**digit % 4 + column // 4**digit % 4 == 3 for digit in range(4))
            for column in range(group)
        ]
        for row in range(group)
    ]
    return torch.div(torch.tensor(signs), group**0.5)


GROUP = 16
ROTATED = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP}


def in_integers(tensors: Tensors) -> Tensors:
    """Return integer matrices with a scale per row, their columns rotated in groups."""
    written = dict(tensors)
    for name, x in tensors.items():
        if name.endswith(".weight") and x.ndim == 2 and x.shape[1] % GROUP == 0:
            rotated = (x.float().reshape(len(x), -1, GROUP) @ rotation(GROUP)).reshape(x.shape)
            scale = rotated.abs().amax(1, keepdim=True) / 127
            written |= {name: (rotated / scale).round().to(torch.int8), f"{name}_scale": scale}
    return written


def layers_of(tensors: Tensors) -> list[str]:
    return [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]


def told_by_tensors(tensors: Tensors, file: Path) -> None:
    written = torch.tensor(list(json.dumps(ROTATED).encode()), dtype=torch.uint8)
    told = {f"{layer}.comfy_quant": written.clone() for layer in layers_of(tensors)}
    save_file(tensors | told, file, metadata={"format": "pt"})


def told_by_header(tensors: Tensors, file: Path, **more: Any) -> None:
    header = {"layers": {layer: {**ROTATED, **more} for layer in layers_of(tensors)}}
    save_file(tensors, file, metadata={"format": "pt", "_quantization_metadata": json.dumps(header)})


@pytest.mark.parametrize("layout", [*LAYOUTS, "encoder"])
@pytest.mark.parametrize("write", [told_by_tensors, told_by_header])
def test_rotated_columns_are_rotated_back(base: Path, tmp_path: Path, write: Any, layout: str) -> None:
    """ComfyUI's int8 files need the rotation: without it, weights of right shape are noise."""
    part = "text_encoder" if layout == "encoder" else "transformer"
    folder = shutil.copytree(base, tmp_path / "rotated")
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    write(in_integers(tensors), file)
    read = encoder(folder) if layout == "encoder" else LAYOUTS[layout](folder)
    layers = [f"{layer}.weight" for layer in layers_of(in_integers(tensors))]
    assert len(layers) > 6
    for name in layers:
        assert relative_difference(read[name], tensors[name]) < 0.02
        assert relative_difference(in_integers(tensors)[name], tensors[name]) > 0.5, (
            "they are other numbers in the file"
        )


def in_scaled_blocks(tensors: Tensors, kind: str) -> tuple[Tensors, Tensors]:
    """Return random weights with a scale per block in cuBLAS's layout, as in ComfyUI, and their values."""
    generator, written, values = torch.Generator().manual_seed(1), dict(tensors), dict(tensors)
    for layer in layers_of(scaled(tensors, ".weight_scale")):
        num_rows, num_columns = tensors[f"{layer}.weight"].shape
        num_blocks = num_columns // (16 if kind == "nvfp4" else 32)
        high, wide = -(-num_rows // 128), -(-num_blocks // 4)
        codes = torch.randint(16, (num_rows, num_columns), generator=generator)
        stored = torch.randint(0x30, 0x40, (high * 128 * wide * 4,), generator=generator, dtype=torch.uint8)
        if kind == "nvfp4":
            written[f"{layer}.weight"] = (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8)
            written[f"{layer}.weight_scale"] = stored.view(torch.float8_e4m3fn).view(high * 128, wide * 4)
            written[f"{layer}.weight_scale_2"] = torch.tensor(0.25)
            written[f"{layer}.pre_quant_scale"] = smooth = torch.rand(num_columns, generator=generator)
            sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            found, scale = sizes[codes % 8] * (1 - 2 * (codes // 8)), stored.view(torch.float8_e4m3fn).float() / 4
        else:
            found, smooth = torch.randn(num_rows, num_columns, generator=generator), torch.ones(1)
            written[f"{layer}.weight"] = found.to(torch.float8_e4m3fn)
            written[f"{layer}.weight_scale"] = (stored + 70).view(high * 128, wide * 4)
            found, scale = found.to(torch.float8_e4m3fn).float(), 2.0 ** (stored.float() + 70 - 127)
        row, block = torch.arange(num_rows)[:, None], torch.arange(num_blocks)[None]
        place = ((row // 128) * wide + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        values[f"{layer}.weight"] = found * scale[place].repeat_interleave(num_columns // num_blocks, 1) * smooth
        told = json.dumps({"format": kind}).encode()
        written[f"{layer}.comfy_quant"] = torch.tensor(list(told), dtype=torch.uint8)
    return written, values


@pytest.mark.parametrize("layout", [*LAYOUTS, "encoder"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_scales_of_blocks(base: Path, tmp_path: Path, kind: str, layout: str) -> None:
    part = "text_encoder" if layout == "encoder" else "transformer"
    folder = shutil.copytree(base, tmp_path / "blocks")
    (file,) = (folder / part).glob("*.safetensors")
    written, expected = in_scaled_blocks(load_file(file), kind)
    assert len(written) - len(expected) > 6
    save_file(written, file, metadata={"format": "pt"})
    read = encoder(folder) if layout == "encoder" else LAYOUTS[layout](folder)
    assert read.keys() == expected.keys()
    assert all(torch.allclose(read[name], x, rtol=1e-6, atol=0) for name, x in expected.items())


def test_a_header_names_layers_without_the_prefix_of_whole_pipelines(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / WEIGHTS)
    makers = in_integers(as_its_makers_have_it(weights))
    layers = {layer.removeprefix("model.diffusion_model."): ROTATED for layer in layers_of(makers)}
    header = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file(makers, tmp_path / "one.safetensors", metadata=header)
    (module,) = Checkpoint.open(f"{tmp_path / 'one.safetensors'}@{base}").denoiser().modules.values()
    name = "layers.0.attention.to_k.weight"
    assert relative_difference(module.state_dict()[name], weights[name]) < 0.02


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"format": "asym_w4a8_int8"}, r"_quantization_metadata of .*'asym_w4a8_int8'.*mxfp8 are read"),
        ({"convrot_groupsize": 8}, "convrot_groupsize must be a power of 4"),
        ({"convrot_groupsize": 256}, "its columns cannot be rotated in groups of 256"),
    ],
)
def test_formats_in_a_header_are_checked(
    base: Path, tmp_path: Path, more: dict[str, Any], message: str, layout: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "rotated")
    told_by_header(in_integers(load_file(folder / WEIGHTS)), folder / WEIGHTS, **more)
    with pytest.raises(ValueError, match=message):
        LAYOUTS[layout](folder)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_rows_of_a_scale_follow_the_rows_of_a_weight(base: Path, tmp_path: Path, is_rotated: bool) -> None:
    """A rank that reads some rows or columns gets those of the whole weight."""
    from engines.parallel.weight_files import Slice, WeightFiles

    folder = changed(base, "transformer", tmp_path / "scaled", lambda x: scaled(x, ".weight_scale", by_row=True))
    name = "layers.0.attention.to_q.weight"
    if is_rotated:
        told_by_header(in_integers(load_file(base / WEIGHTS)), folder / WEIGHTS)
        weight = whole(folder)[name]
    else:
        weight = by_hand(scaled(load_file(base / WEIGHTS), ".weight_scale", by_row=True), ".weight_scale")[name]
    source = WeightFiles(folders={"transformer": folder / "transformer"}, device=torch.device("cpu"))
    ranges = ((1, 3), (5, 9))
    for dim in (0, 1):
        expected: Tensor = torch.cat([weight.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        layer = torch.nn.Linear(expected.shape[1], expected.shape[0], bias=False, device="meta")
        source.fill("transformer", layer, {"weight": Slice(name=name, dim=dim, ranges=ranges)})
        assert torch.equal(layer.weight, expected)
