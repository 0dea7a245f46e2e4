"""Weights read by several threads are those that safetensors and diffusers read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.parallel.weight_files import files_of
from engines.quantization.linear import weights_to_quantise
from pipelines import gpu_weights
from pipelines.blocks.footprint import ForwardMeter
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.directory import part_class
from pipelines.gpu_weights import fill, read_tensors
from pipelines.loading import SHIPPED
from pipelines.models.flux.spec import SHARD_PLAN
from pipelines.models.registry import FAMILY_FOLDERS
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_cosmos,
    tiny_flux3,
    tiny_helios,
    tiny_minimax,
    tiny_others,
)

CPU = torch.device("cpu")
FLUX = SHIPPED / "flux-shapes" / "transformer"


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "wide": torch.randn(70, 33),
        "narrow": torch.randn(513).bfloat16(),
        "half": torch.randn(3, 5).half(),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.5),
        "whole": torch.arange(1000),
        "yes": torch.tensor([True, False, True]),
        "small": torch.randn(40).to(torch.float8_e4m3fn),
    }


def devices() -> list[object]:
    return [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("piece_bytes", [1000, 2**24])
def test_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, piece_bytes: int
) -> None:
    monkeypatch.setattr(gpu_weights, "PIECE_BYTES", piece_bytes)
    save_file(tensors(), tmp_path / "some.safetensors", metadata={"format": "pt"})
    read, expected = read_tensors(tmp_path / "some.safetensors", device), load_file(tmp_path / "some.safetensors")
    assert read.keys() == expected.keys()
    for name, x in read.items():
        assert (x.dtype, x.shape, x.device.type) == (expected[name].dtype, expected[name].shape, device.type), name
        assert torch.equal(x.cpu().view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)), name


def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    for length, said in ((len(data) - 1, "ends 1 bytes before"), (100, "no safetensors file"), (4, "no safetensors")):
        (tmp_path / "cut.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match=said):
            read_tensors(tmp_path / "cut.safetensors", CPU)


@pytest.mark.parametrize(
    "data", [b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 9, b"\2" + bytes(7) + b"[]"]
)
def test_what_is_no_such_file_is_an_error(tmp_path: Path, data: bytes) -> None:
    """Whatever its first bytes say of its length."""
    (tmp_path / "other.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="no safetensors file"):
        read_tensors(tmp_path / "other.safetensors", CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_as_diffusers_loads_it(dtype: torch.dtype) -> None:
    expected = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=dtype)
    model = outline().to(dtype)
    fill(model, files_of(FLUX), CPU)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, x in model.state_dict().items():
        assert x.dtype == dtype
        assert torch.equal(x, expected.state_dict()[name]), name
    assert all(x.device == CPU for x in model.buffers())


def own_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return what diffusers' own class has after loading the transformer in bfloat16."""
    kind = getattr(diffusers, str(part_class(folder, "transformer")))
    model = kind.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    return {name: x.dtype for name, x in model.state_dict().items()}


def read_whole(folder: Path) -> nn.Module:
    return Checkpoint(folder, CPU, torch.bfloat16).denoiser().modules["transformer"]


def read_as_on_gpus(folder: Path) -> nn.Module:
    opened = OpenedPipeline(folder, CPU, torch.bfloat16)
    module: nn.Module = opened._read_part("transformer", folder / "transformer", None)
    return module


def read_sliced(folder: Path) -> nn.Module:
    model = Checkpoint(folder, CPU, torch.bfloat16).denoiser(sliced=True)
    assert model.weights is not None
    model.weights.fill("transformer", model.modules["transformer"], {})
    return model.modules["transformer"]


def read_from_one_file(folder: Path) -> nn.Module:
    """The file has all tensors in bfloat16, as its makers have them."""
    (file,) = (folder / "transformer").glob("*.safetensors")
    one = folder / "one.safetensors"
    save_file({name: x.bfloat16() for name, x in load_file(file).items()}, one)
    checkpoint = Checkpoint.open(f"{one}@{folder}", device=CPU, dtype=torch.bfloat16)
    return checkpoint.denoiser().modules["transformer"]


IN_PARTS: dict[str, Callable[[Path], Path]] = {
    "wan": partial(tiny.wan, expand_timesteps=True),
    "cosmos": tiny_cosmos.cosmos,
    "flux3": tiny_flux3.flux3,
    "helios": tiny_helios.helios,
    "krea2": tiny_others.krea2,
    "minimax": tiny_minimax.minimax_h3,
}
"""Families whose class keeps some modules in float32."""
READERS = (read_whole, read_as_on_gpus, read_sliced)


@pytest.mark.parametrize("name", IN_PARTS)
def test_what_a_class_keeps_in_float32_is_so_however_it_is_read(name: str, tmp_path: Path) -> None:
    folder = IN_PARTS[name](tmp_path)
    expected = own_dtypes(folder)
    assert set(expected.values()) == {torch.float32, torch.bfloat16}
    for read in (*READERS, read_from_one_file) if name == "wan" else READERS:
        found = {key: x.dtype for key, x in read(folder).state_dict().items()}
        assert found == expected, read.__name__


def test_no_other_family_has_modules_in_float32() -> None:
    kept = {name for name in FAMILY_FOLDERS if getattr(diffusers, name)._keep_in_fp32_modules}
    assert {FAMILY_FOLDERS[name] for name in kept} == {"mini_max_h3" if one == "minimax" else one for one in IN_PARTS}


def test_weights_on_the_host_stay_in_the_files() -> None:
    """All others are read as before; the names are those that will be quantised."""
    expected = load_file(files_of(FLUX)[0])
    model = outline().to(expected["proj_out.weight"].dtype)
    names = weights_to_quantise(model, SHARD_PLAN)
    with ForwardMeter() as meter:
        fill(model, files_of(FLUX), CPU, on_host=names)
    parameters = dict(model.named_parameters())
    assert all(x.equal(parameters[name]) for name, x in expected.items())
    assert meter.peak_bytes == sum(x.nbytes for name, x in expected.items() if name not in names)
    assert meter.peak_bytes < 0.5 * sum(x.nbytes for x in expected.values())


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    FluxTransformer2DModel.from_pretrained(FLUX).save_pretrained(tmp_path, max_shard_size="2MB")
    files = files_of(tmp_path)
    assert len(files) > 1
    model = outline()
    fill(model, files, CPU)
    for name, x in FluxTransformer2DModel.from_pretrained(FLUX).state_dict().items():
        assert torch.equal(model.state_dict()[name], x), name
    assert files_of(tmp_path / "nowhere") == ()


def test_what_has_other_tensors_is_an_error(tmp_path: Path) -> None:
    (file,) = files_of(FLUX)
    whole = load_file(file)
    name = next(iter(whole))
    for wrong in (
        {other: x for other, x in whole.items() if other != name},
        whole | {"unknown": torch.zeros(1)},
        whole | {name: torch.zeros(3)},
    ):
        save_file(wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(ValueError, match=r"Missing key|Unexpected key|size mismatch"):
            fill(outline(), [tmp_path / "wrong.safetensors"], CPU)
    shutil.copy(file, tmp_path / "right.safetensors")
    fill(outline(), [tmp_path / "right.safetensors"], CPU)


def outline() -> FluxTransformer2DModel:
    with init_empty_weights():
        return FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(FLUX))
