"""The layout of MiniMax-H3's distilled adapters: makers' names, joined projections, and an alpha in the header."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.run import load_pipeline
from tests.pipelines.lora.support.every_model import MODELS, latents_of
from tests.pipelines.lora.support.keys import Tensors, pair, plain
from tests.pipelines.lora.support.tiny_lora import loader
from tests.pipelines.support.references.own_call import as_it_is
from tests.pipelines.support.references.video import pictures_of

TOLERANCE, SCALE, BLOCKS = 1e-4, 0.8, 2


def turbo(folder: Path) -> Tensors:
    """Pairs for the joined queries, keys and values, and for both layers of the MLP."""
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
