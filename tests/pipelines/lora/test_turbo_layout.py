"""Check the layout of MiniMax-H3's distilled adapters: original names, joined projections, alpha in the header."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import MiniMaxH3ModularPipeline, MiniMaxH3Transformer3DModel
from safetensors.torch import save_file

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.lora.model import read_low_ranks
from pipelines.lora.source import LoraSource
from pipelines.run import load_pipeline
from tests.pipelines.lora.support.every_model import MODELS, latents_of
from tests.pipelines.lora.support.keys import Tensors, added, check, pair, plain
from tests.pipelines.lora.support.tiny_lora import loader
from tests.pipelines.support.references.own_call import as_it_is
from tests.pipelines.support.references.video import pictures_of

TOLERANCE, SCALE, BLOCKS = 1e-4, 0.8, 2


def turbo(folder: Path) -> Tensors:
    """Return pairs for joined queries, keys and values, and for both MLP layers."""
    base, tensors = plain(folder), Tensors()
    for number in range(BLOCKS):
        own = {name: base[f"transformer_blocks.{number}.{name}.weight"].shape for name in ("attn.to_q", "ff.net.2")}
        (queries, width), (out, hidden) = own["attn.to_q"], own["ff.net.2"]
        joined = base[f"transformer_blocks.{number}.ff.net.0.proj.weight"].shape
        sizes = {"attn.qkv_proj": (3 * queries, width), "mlp.fc1": joined, "mlp.fc2": (out, hidden)}
        for name, (rows, columns) in sizes.items():
            tensors |= pair(f"diffusion_model.blocks.{number}.{name}", rows, columns, spelling="A")
    return {name: 0.3 * x for name, x in tensors.items()}


@pytest.mark.parametrize("header", [{}, {"alpha": "8"}], ids=["no alpha", "alpha"])
def test_it_equals_diffusers(header: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = MODELS["minimax h3"], tmp_path / "turbo.safetensors"
    folder = model.make(tmp_path / "model")
    save_file(turbo(folder), file, metadata=header)
    request = model.request(folder)
    with model.world():
        own, bare = (
            latents_of(model.reference(folder, request, (), change)) for change in (loader({file: SCALE}), as_it_is)
        )
        checkpoint = Checkpoint(folder, loras=[LoraSource(path=str(file), scale=SCALE)])
        mine = latents_of(load_pipeline(checkpoint).denoise(request, pictures_of(())))
    for name, latents in own.items():
        assert relative_difference(mine[name], latents) <= TOLERANCE
        assert relative_difference(bare[name], latents) > 0.02, "the adapter is there"


def test_the_alpha_of_a_header_counts_beside_whole_differences(tmp_path: Path) -> None:
    """diffusers' loader then gets the pairs without the rest of the file."""
    torch.manual_seed(0)
    folder = MODELS["minimax h3"].make(tmp_path / "model")
    tensors, norm = turbo(folder), "token_refiner.refiner_blocks.0.norm1.weight"
    whole = {f"transformer.{norm.removesuffix('.weight')}.diff": torch.ones(plain(folder)[norm].shape)}
    for name, written in {"alone": tensors, "both": tensors | whole}.items():
        save_file(written, tmp_path / f"{name}.safetensors", metadata={"alpha": "8"})
    alone, both = (added(folder, tmp_path / f"{name}.safetensors") for name in ("alone", "both"))
    check(both, alone | {norm: torch.ones(plain(folder)[norm].shape)})


def test_rows_of_diffsynths_adapters_are_by_head(tmp_path: Path) -> None:
    """DiffSynth-Studio trains rows in original order: queries, keys and values per head."""
    torch.manual_seed(0)
    heads, size, rank, width = 2, 128, 2, 48
    with init_empty_weights():
        module = MiniMaxH3Transformer3DModel(
            num_attention_heads=heads, attention_head_dim=size, hidden_size=width, num_layers=1, num_refiner_layers=1
        )
    key = "blocks.0.attn.qkv_proj"
    down_RK, up_NR = torch.randn(rank, width), torch.randn(3 * heads * size, rank)
    file = tmp_path / "adapter.safetensors"
    save_file({f"{key}.lora_A.default.weight": down_RK, f"{key}.lora_B.default.weight": up_NR}, file)
    found = read_low_ranks(LoraSource(path=str(file)), module, MiniMaxH3ModularPipeline)
    by_head = (up_NR @ down_RK).reshape(heads, 3, size, width)
    for place, name in enumerate(("to_q", "to_k", "to_v")):
        mine = found[f"transformer_blocks.0.attn.{name}.weight"]
        torch.testing.assert_close(mine.up_NR @ mine.down_RK, by_head[:, place].reshape(heads * size, width))
