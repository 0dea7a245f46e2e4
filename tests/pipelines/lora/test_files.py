"""Check adapter files in common layouts: the result equals diffusers' own loader, or an error names the fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.loading import SHIPPED, resolve_file
from pipelines.lora.adapter_config import alpha_of
from pipelines.lora.source import ADAPTER_FILES, LoraSource
from pipelines.preconditions import adapter_problems
from pipelines.run import load_pipeline
from tests.pipelines.lora.support.tiny_lora import adapted, reference, request_of, write_lora, write_peft
from tests.pipelines.support.checkpoints import tiny

TOLERANCE = 1e-4
DIFFUSERS = "pytorch_lora_weights.safetensors"


def painted(folder: Path, *sources: LoraSource) -> Tensor:
    latents: Tensor = load_pipeline(Checkpoint(folder, loras=sources)).denoise(request_of(folder))["latents"]
    return latents


@cache
def without(folder: Path) -> Tensor:
    return painted(folder)


def check(folder: Path, path: Path) -> None:
    mine = painted(folder, LoraSource(path=str(path), scale=0.8))
    assert relative_difference(mine, reference(folder, request_of(folder), {path: 0.8})) <= TOLERANCE
    assert relative_difference(mine, without(folder)) > 0.02, "the adapter is there"


PATTERNS: dict[str, Any] = {
    "rank_pattern": {"attn.to_q": 2, "proj_out": 3},
    "alpha_pattern": {"attn.to_k": 1, r"^proj_out": 2},
}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("flux", PATTERNS),
        ("flux", {"use_rslora": True}),
        ("flux", {"lora_bias": True}),
        ("wan", {"target_modules": ["patch_embedding", "to_q", "ffn.net.2"]}),
        ("klein", {"says_alpha": False, **PATTERNS}),
    ],
    ids=["patterns", "rslora", "biases", "a convolution", "no alpha"],
)
def test_what_peft_can_write(small: Callable[[str], Path], tmp_path: Path, model: str, config: dict[str, Any]) -> None:
    check(small(model), write_lora(small(model), tmp_path, seed=1, **config))


def kohya(path: Path, *, alpha: float) -> Path:
    """Write the layout of kohya's scripts, in the layer names of Black Forest Labs' code."""
    generator = torch.Generator().manual_seed(3)
    layers = {
        "double_blocks_0_img_attn_qkv": (192, 64),
        "double_blocks_1_txt_attn_proj": (64, 64),
        "double_blocks_1_img_mlp_0": (256, 64),
        "single_blocks_1_linear2": (64, 320),
    }
    tensors: dict[str, Tensor] = {}
    for name, (rows, columns) in layers.items():
        tensors[f"lora_unet_{name}.lora_down.weight"] = torch.randn(4, columns, generator=generator) / columns**0.5
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.randn(rows, 4, generator=generator)
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path)
    return path


def test_kohyas_layout(small: Callable[[str], Path], tmp_path: Path) -> None:
    check(small("flux"), kohya(tmp_path / "any-name.safetensors", alpha=3.0))


def test_pefts_own_folder_equals_what_diffusers_saves(small: Callable[[str], Path], tmp_path: Path) -> None:
    folder = small("klein")
    same = write_lora(folder, tmp_path / "diffusers", seed=1, **PATTERNS)
    transformer = adapted(folder, seed=1, **PATTERNS)
    own = write_peft(transformer, tmp_path / "peft")
    assert painted(folder, LoraSource(path=str(own))).equal(painted(folder, LoraSource(path=str(same))))


def test_other_parts_are_left_out_if_a_part_is_named(small: Callable[[str], Path], tmp_path: Path) -> None:
    folder, text = small("flux"), torch.zeros(2, 2)
    path = write_lora(folder, tmp_path, seed=1, says_alpha=False)
    expected = painted(folder, LoraSource(path=str(path)))
    save_file(load_file(path / DIFFUSERS) | {"text_encoder.layer.lora_A.weight": text}, path / DIFFUSERS)
    with pytest.raises(
        ValueError, match=r"text_encoder\.layer\.lora_A\.weight belong to other parts.*part: transformer"
    ):
        painted(folder, LoraSource(path=str(path)))
    assert painted(folder, LoraSource(path=str(path), part="transformer")).equal(expected)


def test_two_experts_have_adapters_of_their_own(tmp_path: Path) -> None:
    folder = tiny.wan(tmp_path / "model", boundary_ratio=0.5)
    path = str(write_lora(folder, tmp_path / "lora", seed=1))
    merged = Checkpoint(folder, loras=[LoraSource(path=path, part="transformer_2")]).denoiser().modules
    plain = Checkpoint(folder).denoiser().modules
    name = "blocks.0.attn1.to_q.weight"
    assert merged["transformer"].get_parameter(name).equal(plain["transformer"].get_parameter(name))
    assert not merged["transformer_2"].get_parameter(name).equal(plain["transformer_2"].get_parameter(name))
    with pytest.raises(ValueError, match="part 'unet': the model has transformer, transformer_2"):
        Checkpoint(folder, loras=[LoraSource(path=path, part="unet")]).denoiser()


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
BROKEN: dict[str, tuple[Change, str]] = {
    "shapes": (
        lambda x: {key: one.repeat(1, 2) if ".lora_A" in key and "to_q" in key else one for key, one in x.items()},
        r"is for another model: 4 of its \d+ parameters have other shapes than those of FluxTransformer2DModel, "
        r"single_transformer_blocks\.0\.attn\.to_q\.weight \(64, 128\) for \(64, 64\)",
    ),
    "names": (
        lambda x: {key.replace("transformer_blocks", "layers"): one for key, one in x.items()},
        r"is for another model: it has layers\.0\.attn\.add_k_proj\.weight, .* and \d+ more, and "
        r"FluxTransformer2DModel has no such parameters, but context_embedder\.bias",
    ),
    "halves": (
        lambda x: {key: one for key, one in x.items() if not ("to_q" in key and ".lora_B" in key)},
        r"pairs of lora_A and lora_B; these are none: single_transformer_blocks\.0\.attn\.to_q\.lora_A\.weight",
    ),
    "nothing": (lambda x: {"transformer.lora_A": torch.zeros(1)}, "lora_A"),
    "weights of a model": (lambda x: {"proj_out.weight": torch.zeros(1)}, "for which no part of the model has a place"),
    "DoRA": (lambda x: x | {"transformer.proj_out.dora_scale": torch.zeros(1)}, "is a DoRA adapter"),
    "LoKr": (lambda x: {"transformer.proj_out.lokr_w1": torch.zeros(1)}, "which make no LoKr or LoHa of two matrices"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_told_at_start(small: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder, (change, message) = small("flux"), BROKEN[name]
    path = write_lora(folder, tmp_path, seed=1, says_alpha=False)
    save_file({key: x.contiguous() for key, x in change(load_file(path / DIFFUSERS)).items()}, path / DIFFUSERS)
    for source in (LoraSource(path=str(path)), LoraSource(path=str(path), name="ink")):
        with pytest.raises(ValueError, match=message):
            Checkpoint(folder, loras=[source]).denoiser()


def test_an_adapter_of_another_model_is_told(small: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_lora(small("wan"), tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"is for another model: it has blocks\.0\.attn1\.to_k\.weight"):
        Checkpoint(small("flux"), loras=[LoraSource(path=str(path))]).denoiser()


def test_which_file_is_meant(small: Callable[[str], Path], tmp_path: Path) -> None:
    folder = small("klein")
    written = write_lora(folder, tmp_path / "one", seed=1) / DIFFUSERS
    expected = painted(folder, LoraSource(path=str(written)))
    (several := tmp_path / "several").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (several / name).write_bytes(written.read_bytes())
    assert painted(folder, LoraSource(path=str(written.parent))).equal(expected)
    assert painted(folder, LoraSource(path=str(several), file="b.safetensors")).equal(expected)
    for file in ("", "c.safetensors"):
        with pytest.raises(ValueError, match=r"say file: NAME in a .*; there are: a\.safetensors, b\.safetensors"):
            painted(folder, LoraSource(path=str(several), file=file))
    with pytest.raises(ValueError, match="no adapter 'nowhere'"):
        painted(folder, LoraSource(path="nowhere"))
    with pytest.raises(ValueError, match="not in the hub cache"):
        painted(folder, LoraSource(path="owner/nothing"))


def test_a_shipped_checkpoint_is_a_folder_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is found unless a folder has that name; a missing file is an error before the start."""
    name, file = "flux-shapes", "recipes/four-steps.safetensors"
    assert resolve_file(name, file, ADAPTER_FILES) == SHIPPED / name / file
    assert list(adapter_problems(Checkpoint.open(name), [LoraSource(path=name, file=file)])) == []
    (problem,) = adapter_problems(Checkpoint.open(name), [LoraSource(path=name, file="a.safetensors")])
    assert "say file: NAME in a configuration" in problem
    with pytest.raises(ValueError, match=r"no adapter 'other-shapes': .* or one of flux-shapes"):
        resolve_file("other-shapes", "", ADAPTER_FILES)
    monkeypatch.chdir(tmp_path)
    own = tmp_path / name / file
    own.parent.mkdir(parents=True)
    own.touch()
    assert resolve_file(name, file, ADAPTER_FILES).resolve() == own
    (own.parent / f"._{own.name}").touch()
    assert resolve_file(str(own.parent), "", ADAPTER_FILES) == own


def test_each_pattern_of_layers_is_compiled_once() -> None:
    """PEFT writes one pattern per layer with its own alpha, more than the cache of ``re`` holds."""
    layers = [f"transformer_blocks.{number}.attn.to_q" for number in range(600)]
    config = {"alpha_pattern": {layer: number for number, layer in enumerate(layers)}}
    compiler: Any = vars(re)["_compiler"]
    with patch.object(compiler, "compile", wraps=compiler.compile) as compiled:
        assert [alpha_of(config, layer, 4) for layer in layers[-3:]] == [597, 598, 599]
    assert compiled.call_count <= len(layers)
