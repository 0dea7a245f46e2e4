"""Weights read by several threads equal those of safetensors and diffusers."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import diffusers
import pytest
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from engines.parallel import file_reading
from engines.parallel.weight_files import files_of, first_not_finite
from engines.quantization.linear import weights_to_quantise
from pipelines import component_weights, gpu_weights
from pipelines.blocks.footprint import ForwardMeter
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.directory import part_class
from pipelines.gpu_weights import FileTensors, fill, read_tensors
from pipelines.loading import SHIPPED
from pipelines.models.flux.spec import SHARD_PLAN
from pipelines.models.registry import FAMILY_FOLDERS
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_animate,
    tiny_cosmos,
    tiny_flux3,
    tiny_helios,
    tiny_hunyuan,
    tiny_minimax,
    tiny_models,
    tiny_others,
    tiny_pictures,
    tiny_vace,
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
    gpus = torch.device("cuda", 0), torch.device("cuda")
    return [CPU, *(pytest.param(gpu, id=str(gpu), marks=pytest.mark.gpu) for gpu in gpus)]


def test_a_gpu_without_an_index_is_the_current_one_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is "cuda", which ``torch.cuda.set_device`` refuses."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with file_reading.SpanReader(torch.device("cuda")) as reader:
        assert reader.device == torch.device("cuda", 1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("piece_bytes", [1000, 2**24])
def test_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, piece_bytes: int
) -> None:
    monkeypatch.setattr(file_reading, "PIECE_BYTES", piece_bytes)
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
    """Other files are an error, whatever length their first bytes give."""
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
    """Return the dtypes of diffusers' own class after loading the transformer in bfloat16."""
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
    """Return the module from a file with all tensors in bfloat16, as published."""
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
    "wan_animate2": tiny_animate.wan_animate2,
    "wan_vace": tiny_vace.wan_vace,
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
    """All others are read as usual; the names are those of weights to quantise."""
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_that_is_not_finite_is_named(value: float) -> None:
    """Dtypes alternate, and each is checked separately."""
    torch.manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
    named = {f"{number}": torch.randn(3, 1 + number).to(dtypes[number % 4]) for number in range(12)}
    named |= {"none": torch.empty(0, 4), "whole": torch.arange(3), "one": torch.tensor(3.5)}
    assert first_not_finite(named.items()) is None
    for faulty in (("7",), ("9", "6"), ("one", "11"), ("one",), ("5", "3", "0")):
        damaged = dict(named)
        for name in faulty:
            damaged[name] = named[name].clone()
            damaged[name].view(-1)[-1] = value
        expected = next(name for name, x in damaged.items() if not x.isfinite().all())
        assert first_not_finite(damaged.items()) == expected
    assert first_not_finite({"large": torch.tensor([3e38, -3e38])}.items()) is None


def outline() -> FluxTransformer2DModel:
    with init_empty_weights():
        return FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(FLUX))


PYTORCH = {"format": "pt"}
ENCODERS: dict[str, Callable[[Path], Path]] = {
    "CLIPTextModel, T5EncoderModel": tiny.flux,
    "UMT5EncoderModel": tiny.wan,
    "Qwen3VLForConditionalGeneration": tiny_flux3.flux3,
    "Qwen2_5_VLTextModel, T5EncoderModel": tiny_hunyuan.hunyuan_video,
    "Qwen3Model": tiny_models.z_image,
    "Qwen3ForCausalLM": tiny_models.flux2_klein,
    "Qwen2_5_VLForConditionalGeneration": tiny_models.qwen_image,
    "Qwen3VLModel": tiny_others.krea2,
    "Mistral3Model": tiny_others.ernie_image,
    "Mistral3ForConditionalGeneration": tiny_pictures.flux2_dev,
    "CLIPTextModelWithProjection, CLIPTextModelWithProjection, T5EncoderModel": tiny_others.sd3,
}
"""Folders by encoder classes."""


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", ENCODERS)
def test_encoders_are_as_transformers_loads_them(
    kinds: str, dtype: torch.dtype, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component_weights, "FAST_DEVICES", ())
    opened = OpenedPipeline(ENCODERS[kinds](tmp_path / "model"), device, dtype)
    names = [name for name in opened.loaded_parts(opened.blocks.sub_blocks) if name.startswith("text_encoder")]
    assert ", ".join(opened.part_class(name).__name__ for name in names) == kinds
    expected = {name: opened.load_part(name) for name in names}
    reader = Mock(wraps=read_tensors)
    monkeypatch.setattr(gpu_weights, "read_tensors", reader)
    monkeypatch.setattr(component_weights, "FAST_DEVICES", (device.type,))
    for name, other in expected.items():
        model = opened.load_part(name)
        assert same_tensors(model, other)
        assert model.config.to_dict() == other.config.to_dict()
        assert model.name_or_path == other.name_or_path
        assert not model.training
        if model.can_generate():
            assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert reader.call_count == len(names)


def test_a_file_beside_shards_is_read_like_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories that were saved twice have both, and diffusers prefers the shards."""
    folder, name = tiny_models.z_image(tmp_path / "model"), "model.safetensors"
    tensors = load_file(folder / "text_encoder" / name)
    save_file({key: x + 1 for key, x in tensors.items()}, folder / "text_encoder" / "shard.safetensors", PYTORCH)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "shard.safetensors")}
    (folder / "text_encoder" / f"{name}.index.json").write_text(json.dumps(index))
    read = []
    for fast in ((), ("cpu",)):
        monkeypatch.setattr(component_weights, "FAST_DEVICES", fast)
        read.append(OpenedPipeline(folder, CPU, torch.float32).load_part("text_encoder"))
    assert same_tensors(*read)
    assert all(torch.equal(x, tensors[key]) for key, x in read[0].state_dict().items() if key in tensors)


def same_tensors(model: nn.Module, other: nn.Module) -> bool:
    """Return whether all parameters and buffers are the same bytes, and the same names are tied."""
    for kind in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(one, kind)(remove_duplicate=False)) for one in (model, other))
        assert found.keys() == expected.keys()
        for name, x in found.items():
            other_x = expected[name]
            assert (x.dtype, x.shape, x.device) == (other_x.dtype, other_x.shape, other_x.device), name
            assert not x.requires_grad
            assert torch.equal(x.flatten().view(torch.uint8), other_x.flatten().view(torch.uint8)), name
    return tied(model) == tied(other)


def tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return sorted(names.values())


@pytest.mark.parametrize("shard_size", ["400KB", "1GB"])
def test_an_encoder_that_is_cast_has_one_group_in_memory_beside(
    shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are in float32. A group is read when its first tensor is needed, and released tensor by tensor."""
    config = T5Config(d_model=64, d_kv=16, d_ff=256, num_layers=12, num_heads=4, vocab_size=32)
    T5EncoderModel(config).save_pretrained(tmp_path, max_shard_size=shard_size)
    files = files_of(tmp_path, component_weights.ENCODER_NAME)
    monkeypatch.setattr(gpu_weights, "GROUP_BYTES", 400_000)
    made: list[weakref.ref[Tensor]] = []
    alive_bytes: list[int] = []

    def read(file: Path, device: torch.device, only: set[str]) -> dict[str, Tensor]:
        alive_bytes.append(sum(x.nbytes for one in made if (x := one()) is not None))
        found = read_tensors(file, device, only=only)
        assert sum(x.nbytes for x in found.values()) <= 400_000
        made.extend(map(weakref.ref, found.values()))
        return found

    monkeypatch.setattr(gpu_weights, "read_tensors", read)
    settings = {"dtype": torch.bfloat16, "output_loading_info": True}
    model, _ = component_weights._from_tensors(T5EncoderModel, tmp_path, FileTensors(files, CPU).lazy(), "", settings)
    assert len(alive_bytes) >= max(5, len(files))
    assert max(alive_bytes) <= model.shared.weight.numel() * 4, "only the table, which is needed last, waits"
    assert component_weights.ONE_THREAD not in os.environ


@pytest.mark.parametrize("before", [None, "0"])
def test_loads_that_overlap_all_stay_on_their_threads(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set until the last load has ended, then restored."""
    if before is None:
        monkeypatch.delenv(component_weights.ONE_THREAD, raising=False)
    else:
        monkeypatch.setenv(component_weights.ONE_THREAD, before)
    with ExitStack() as second:
        with component_weights.OnThisThread.loading():
            second.enter_context(component_weights.OnThisThread.loading())
            assert os.environ[component_weights.ONE_THREAD] == "1"
        assert os.environ.get(component_weights.ONE_THREAD) == "1"
    assert os.environ.get(component_weights.ONE_THREAD) == before


def test_tensors_that_are_taken_are_released(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "some.safetensors")
    files = FileTensors([tmp_path / "some.safetensors"], CPU)
    lazy = files.lazy()
    assert files._read == {}
    for name, x in tensors().items():
        assert torch.equal(lazy[name][...].view(-1).view(torch.uint8), x.view(-1).view(torch.uint8))
    assert files._read == {}
