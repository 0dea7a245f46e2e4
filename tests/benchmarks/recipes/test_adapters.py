"""Adapters that the benchmark writes are read like the published ones: each layer, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.models.folders import diffusers_model
from benchmarks.recipes.adapters import PUBLISHED, RANK, tensors_of, write_adapter
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_configuration
from pipelines.lora.model import read_low_ranks
from pipelines.lora.source import LoraSource
from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.checkpoints.tiny_qwen import qwen

TINY: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "FLUX.1-dev": ("turbo-8", tiny.flux),
    "Wan2.1-T2V-14B": ("lightx2v-4", tiny.wan),
    "Wan2.2-T2V-A14B": ("lightning-4", tiny.wan22),
    "Qwen-Image": ("lightning-8", qwen),
}
BLOCKS = ("transformer_blocks.", "blocks.")


@pytest.mark.parametrize("name", TINY)
def test_files_change_the_layers_of_the_published_ones(name: str, tmp_path: Path) -> None:
    recipe, make = TINY[name]
    model = make(tmp_path / "model")
    path, *_ = write_adapter(model, tmp_path / "adapters", PUBLISHED[name][recipe], seed=1)
    pipeline_class = type(Checkpoint(model)._opened.pipeline)
    module = diffusers_model(model, "transformer")
    found = read_low_ranks(LoraSource(path=str(path), name=recipe), module, pipeline_class)
    linears = {f"{own}.weight" for own, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    if name == "FLUX.1-dev":
        assert found.keys() == linears
        return
    blocks = {own for own in linears if own.startswith(BLOCKS) and "_mod." not in own}
    assert blocks <= found.keys()
    vectors = {own for own, x in module.named_parameters() if x.ndim == 1 and own.startswith(BLOCKS)}
    assert found.keys() - blocks == (vectors if name == "Wan2.1-T2V-14B" else set())


@pytest.mark.parametrize(
    ("name", "recipe", "num_mb"), [("FLUX.1-dev", "turbo-8", 694), ("FLUX.1-dev", "hyper-8", 1388)]
)
def test_files_are_as_large_as_the_published_ones(
    name: str, recipe: str, num_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PUBLISHED[name][recipe].layout
    monkeypatch.setattr("benchmarks.recipes.adapters._normal", lambda shape, _, layout, __: empty(shape, layout.dtype))
    with torch.device("meta"):
        module = diffusers_model(resolve_configuration(name), "transformer")
    tensors = tensors_of(module, layout, seed=1)
    assert round(sum(x.nbytes for x in tensors.values()) / 1e6) == num_mb
    assert {min(x.shape) for x in tensors.values()} == {RANK}


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_values_are_the_same_for_a_seed(tmp_path: Path) -> None:
    model, adapter = tiny.flux(tmp_path / "model"), PUBLISHED["FLUX.1-dev"]["turbo-8"]
    first, same, other = (
        load_file(write_adapter(model, tmp_path / str(number), adapter, seed)[0])
        for number, seed in enumerate((1, 1, 2))
    )
    assert all(first[key].equal(same[key]) for key in first)
    assert not any(first[key].equal(other[key]) for key in first)
