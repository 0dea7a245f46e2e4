"""A transformer from a GGUF file equals diffusers' own quantiser with the same file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig, ZImageTransformer2DModel
from safetensors.torch import load_file
from transformers import Qwen3Model

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.preconditions import weight_problems
from pipelines.request import MediaRequest
from pipelines.single_file import check_training, split_source, warn_of_parts
from pipelines.size import Size
from tests.pipelines.loading.test_single_file import WEIGHTS, as_its_makers_have_it
from tests.pipelines.support.checkpoints import tiny_models
from tests.pipelines.support.device_jobs import HALF_TOLERANCE, Job, Latents, check_jobs, made_on_cpu
from tests.pipelines.support.references.own_call import own_state

BLOCK = 32
"""Values per scale; rows whose length is no multiple stay in float32, as in ComfyUI's files."""


@pytest.fixture(scope="module")
def base(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_models.z_image)


def write(base: Path, file: Path, kind: gguf.GGMLQuantizationType, *, reshaped: str = "") -> int:
    """Write the transformer of ``base`` in its makers' names. Return the number of quantised tensors."""
    writer, num_quantised = gguf.GGUFWriter(file, "lumina2"), 0
    for name, weight in as_its_makers_have_it(load_file(base / WEIGHTS)).items():
        name, values = name.removeprefix("model.diffusion_model."), weight.float().numpy()
        if name == reshaped:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
            values = values.reshape(-1, BLOCK)
        if name.endswith(".weight") and values.ndim == 2 and values.shape[1] % BLOCK == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
            num_quantised += 1
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    finish(writer)
    return num_quantised


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def diffusers_own(file: Path, base: Path) -> Any:
    own: Any = ZImageTransformer2DModel
    return own.from_single_file(
        str(file),
        config=str(base / "transformer"),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    ).eval()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16"])
def test_it_computes_what_diffusers_does(kind: str, base: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.gguf"
    assert write(base, file, gguf.GGMLQuantizationType[kind]) > 10
    model = Checkpoint.open(f"{file}@{base}", "cpu", torch.float32).denoiser()
    branch, (module,) = model.probe()[0], model.modules.values()
    mine = model.forward(module, branch.arguments)
    assert relative_difference(mine, model.forward(diffusers_own(file, base), branch.arguments)) < 1e-6
    (plain,) = Checkpoint(base, "cpu", torch.float32).denoiser().modules.values()
    assert relative_difference(mine, model.forward(plain, branch.arguments)) > 1e-4


def test_a_gang_that_quantises_reads_the_same_values(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.gguf"
    write(base, file, gguf.GGMLQuantizationType.Q8_0)
    states = [
        dict(next(iter(Checkpoint.open(f"{file}@{base}").denoiser(quantised=quantised).modules.values())).state_dict())
        for quantised in (False, True)
    ]
    assert all(weight.equal(states[1][name]) for name, weight in states[0].items())


def test_a_tensor_has_the_shape_that_the_file_says(base: Path, tmp_path: Path) -> None:
    file, name = tmp_path / "tuned.gguf", "x_embedder.weight"
    write(base, file, gguf.GGMLQuantizationType.Q8_0, reshaped=name)
    (module,) = Checkpoint.open(f"{file}@{base}").denoiser().modules.values()
    (read, own) = (
        dict(one)[f"all_{name.replace('.', '.2-1.')}"]
        for one in (module.named_parameters(), load_file(base / WEIGHTS).items())
    )
    assert relative_difference(read, own) < 0.01


def job_of(base: Path, file: Path) -> Job:
    """Return a job to compare with diffusers' blocks and its own quantiser's transformer."""

    def own(request: MediaRequest) -> Latents:
        state = own_state(
            base, request, change=lambda one: one.update_components(transformer=diffusers_own(file, base))
        )
        return {"latents": state.get("latents")}

    size = Size(width=80, height=48)
    request = Checkpoint(base).defaults.request(size, prompt="a red circle", seed=5, num_inference_steps=3)
    return Job(request=request, own=own)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_jobs_on_a_gpu_are_those_of_diffusers(dtype: torch.dtype, base: Path, tmp_path: Path, gpu_device: str) -> None:
    file = tmp_path / "tuned.gguf"
    write(base, file, gguf.GGMLQuantizationType.Q8_0)
    checkpoint, job = Checkpoint.open(f"{file}@{base}", gpu_device, dtype), job_of(base, file)
    if dtype == torch.float32:
        check_jobs(checkpoint, job, compiled=False, fast=False)
    else:
        check_jobs(checkpoint, made_on_cpu(checkpoint, job), HALF_TOLERANCE)


@pytest.mark.gpu
def test_parts_of_a_folder_on_a_gpu_are_as_on_the_cpu(base: Path, tmp_path: Path, gpu_device: str) -> None:
    checkpoint = Checkpoint(in_folders(base, tmp_path / "model"), gpu_device, torch.float32)
    job = made_on_cpu(checkpoint, job_of(base, tmp_path))
    check_jobs(checkpoint, job, compiled=False, fast=False)


def test_files_that_cannot_be_read_are_errors(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.gguf"
    writer = gguf.GGUFWriter(file, "lumina2")
    kind = gguf.GGMLQuantizationType.IQ3_S
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert block == 256
    writer.add_tensor("layers.0.w", np.zeros((2, num_bytes), np.uint8), raw_dtype=kind)
    finish(writer)
    checkpoint = Checkpoint.open(f"{file}@{base}")
    assert not [*weight_problems(checkpoint)]
    with pytest.raises(ValueError, match=r"tuned\.gguf has layers\.0\.w as IQ3_S, and only .*Q8_0.* are read"):
        checkpoint.denoiser()
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"tuned\.gguf is no GGUF file, or not the whole of one"):
        checkpoint.denoiser()
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert [*weight_problems(checkpoint)] == [f"{file} is no GGUF file: download it again"]


def test_other_parts_and_training_are_told_of_as_in_other_files(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """stable-diffusion.cpp writes whole checkpoints as GGUF."""
    file = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(file, "sdxl")
    for name in ("model.diffusion_model.x", "first_stage_model.x", "v_pred"):
        writer.add_tensor(name, np.zeros(1, np.float32))
    finish(writer)
    warn_of_parts(file, base)
    assert f"{file} also has first_stage_model, which are not read" in caplog.text
    with pytest.raises(ValueError, match=r"was trained with \{'prediction_type': 'v_prediction'\}"):
        check_training(file, {})


def test_a_missing_package_is_named_before_anything_starts(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.gguf"
    file.touch()
    missing = patch("pipelines.directory.find_spec", lambda name: None)
    with missing, pytest.raises(ValueError, match=r"tuned\.gguf needs the package gguf: pip install '\.\[gguf\]'"):
        split_source(f"{file}@{base}")
    assert split_source(f"{file}@{base}") == (file, str(base))


def in_folders(base: Path, folder: Path) -> Path:
    """Write the model of ``base`` with transformer and text encoder in a GGUF file each."""
    shutil.copytree(base, folder)
    kind = gguf.GGMLQuantizationType.Q8_0
    write(base, folder / "transformer" / "tuned.gguf", kind)
    write_encoder(base, folder / "text_encoder" / "encoder.gguf", kind)
    for part in ("transformer", "text_encoder"):
        for file in (folder / part).glob("*.safetensors"):
            file.unlink()
    return folder


def write_encoder(
    base: Path, file: Path, kind: gguf.GGMLQuantizationType, architecture: str = "qwen3", *, more_layers: int = 0
) -> None:
    """Write the text encoder of ``base`` in llama.cpp's names, with copies of its first layer behind the others."""
    config = json.loads((base / "text_encoder" / "config.json").read_text())
    tensors, num_layers = (
        dict(Qwen3Model.from_pretrained(base / "text_encoder").state_dict()),
        config["num_hidden_layers"],
    )
    for number in range(num_layers, num_layers + more_layers):
        first = {name: weight for name, weight in tensors.items() if name.startswith("layers.0.")}
        tensors |= {name.replace("layers.0.", f"layers.{number}."): weight for name, weight in first.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers + more_layers)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(num_layers + more_layers)
    writer.add_vocab_size(config["vocab_size"])
    for name, weight in tensors.items():
        values = weight.float().numpy()
        written = names.get_name(f"model.{name}", try_suffixes=(".weight",))
        assert written is not None, name
        if values.ndim == 2 and values.shape[1] % BLOCK == 0:
            writer.add_tensor(written, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(written, values)
    finish(writer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more_layers": 1}, r"no place for blk\.\d\.attn_k\.weight"),
        ({"architecture": "llama"}, "is of llama, and a Qwen3Model is read from GGUF files of qwen3: take safetensors"),
        ({"architecture": "qwen2vl"}, "is of qwen2vl, and a Qwen3Model is read from GGUF files of qwen3"),
    ],
)
def test_an_encoder_of_another_size_or_kind_is_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """transformers silently drops tensors of a GGUF file that the model lacks."""
    folder = in_folders(base, tmp_path / "model")
    write_encoder(base, folder / "text_encoder" / "encoder.gguf", gguf.GGMLQuantizationType.Q8_0, **changes)
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder).text_encoder().encode(Checkpoint(folder).defaults.request())


def test_parts_of_a_folder_may_be_gguf(base: Path, tmp_path: Path) -> None:
    folder = in_folders(base, tmp_path / "model")
    assert not [*weight_problems(Checkpoint(folder))]
    (module,) = Checkpoint(folder, "cpu", torch.float32).denoiser().modules.values()
    (alone,) = (
        Checkpoint.open(f"{folder / 'transformer' / 'tuned.gguf'}@{base}", "cpu", torch.float32)
        .denoiser()
        .modules.values()
    )
    assert all(weight.equal(module.state_dict()[name]) for name, weight in alone.state_dict().items())
    request = Checkpoint(folder).defaults.request()
    mine, exact = (
        Checkpoint(each, "cpu", torch.float32).text_encoder().encode(request).values["prompt_embeds"][0]
        for each in (folder, base)
    )
    assert 1e-5 < relative_difference(mine, exact) < 0.05
    with pytest.raises(ValueError, match="has weights of GGUF, which are read whole: say load: whole"):
        Checkpoint(folder).denoiser(sliced=True)
    (folder / "text_encoder" / "other.gguf").touch()
    with pytest.raises(
        ValueError, match=r"text_encoder has encoder\.gguf, other\.gguf: leave one of these files there"
    ):
        Checkpoint(folder).text_encoder().encode(request)
