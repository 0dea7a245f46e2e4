"""Check names of parts in adapter files: the U-Net, and transformers whose pipeline has no adapter loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_pipeline import CosmosLoraLoaderMixin
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.run import load_pipeline
from tests.pipelines.lora.support.tiny_lora import adapted, reference, request_of, write_lora, write_peft
from tests.pipelines.support.checkpoints import tiny_cosmos, tiny_unknown

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def sdxl(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_unknown.sdxl)


@pytest.fixture(scope="module")
def cosmos(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_cosmos.cosmos)


@cache
def painted(folder: Path, *sources: LoraSource) -> Tensor:
    latents: Tensor = load_pipeline(Checkpoint(folder, loras=sources)).denoise(request_of(folder))["latents"]
    return latents


def check(folder: Path, path: Path) -> None:
    """Compare with diffusers and the layers that it loads."""
    mine = painted(folder, LoraSource(path=str(path), scale=0.8))
    assert relative_difference(mine, reference(folder, request_of(folder), {path: 0.8})) <= TOLERANCE
    assert relative_difference(mine, painted(folder)) > 0.02, "the adapter is there"


PATTERNS: dict[str, Any] = {"rank_pattern": {"to_q": 2, "conv1": 3}, "alpha_pattern": {"to_k": 1, r"^conv_out": 2}}


def test_convolutions_of_a_u_net(sdxl: Path, tmp_path: Path) -> None:
    layers = ["conv_in", "conv_out", "conv1", "conv_shortcut", "to_q", "to_k", "proj_in", "linear_1"]
    check(sdxl, write_lora(sdxl, tmp_path, seed=1, target_modules=layers, **PATTERNS))


ATTENTION = "transformer_blocks_0_attn1_to_q"
KOHYA: dict[str, Mapping[str, tuple[int, int]]] = {
    "names of diffusers": {
        f"down_blocks_1_attentions_0_{ATTENTION}": (32, 32),
        "mid_block_attentions_0_transformer_blocks_0_attn2_to_k": (32, 32),
        "up_blocks_0_attentions_1_transformer_blocks_0_ff_net_2": (32, 128),
    },
    "names of Stability AI": {
        f"input_blocks_3_1_{ATTENTION}": (32, 32),
        f"middle_block_1_{ATTENTION}": (32, 32),
        f"output_blocks_1_1_{ATTENTION}": (32, 32),
    },
}
"""Layer names after ``lora_unet_``, with rows and columns."""
RANK = 4
ONES = (1.0, 1.0, 1.0)


def kohya(
    path: Path,
    layers: Mapping[str, tuple[int, int]],
    alphas: tuple[float, ...] = (3, 3, 3),
    ups: tuple[float, ...] = ONES,
) -> Path:
    """Write a file in kohya's names; ``alphas`` and ``ups`` (upper factors) are by layer."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for (name, (rows, columns)), alpha, up in zip(layers.items(), alphas, ups, strict=False):
        tensors[f"{name}.lora_down.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
        tensors[f"{name}.lora_up.weight"] = torch.randn(rows, RANK, generator=generator) * up
        tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("names", KOHYA)
def test_kohyas_layout_of_a_u_net(sdxl: Path, tmp_path: Path, names: str) -> None:
    layers = {f"lora_unet_{name}": shape for name, shape in KOHYA[names].items()}
    check(sdxl, kohya(tmp_path / "any-name.safetensors", layers))
    alphas = kohya(tmp_path / "alphas.safetensors", layers, alphas=(3, 2, 1))
    ups = kohya(tmp_path / "ups.safetensors", layers, alphas=(RANK, RANK, RANK), ups=(3 / RANK, 2 / RANK, 1 / RANK))
    mine, expected = (painted(sdxl, LoraSource(path=str(path))) for path in (alphas, ups))
    assert relative_difference(mine, expected) <= TOLERANCE, "each layer has its own alpha, which diffusers leaves out"


def test_text_encoders_are_left_out_if_the_u_net_is_named(sdxl: Path, tmp_path: Path) -> None:
    layers = {f"lora_unet_{name}": shape for name, shape in KOHYA["names of Stability AI"].items()}
    alone = kohya(tmp_path / "alone.safetensors", layers)
    text = {"lora_te1_text_model_encoder_layers_0_self_attn_q_proj": (16, 16)}
    both = kohya(tmp_path / "both.safetensors", {**layers, **text}, alphas=(3, 3, 3, 3), ups=(*ONES, 1))
    with pytest.raises(ValueError, match=r"not for the unet alone: lora_te1_text_model\S+, .*say part: unet"):
        painted(sdxl, LoraSource(path=str(both)))
    expected = painted(sdxl, LoraSource(path=str(alone)))
    assert painted(sdxl, LoraSource(path=str(both), part="unet")).equal(expected)


def test_a_text_conditioner_is_left_out_if_the_transformer_is_named(tmp_path: Path) -> None:
    """diffusers' loader of Anima reads both."""
    folder = tiny_unknown.anima(tmp_path / "model")
    alone = write_lora(folder, tmp_path / "alone", seed=1, says_alpha=False) / "pytorch_lora_weights.safetensors"
    pair = {f"text_conditioner.blocks.0.cross_attn.q_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    both = tmp_path / "both.safetensors"
    save_file({**load_file(alone), **pair}, both)
    with pytest.raises(ValueError, match=r"not for the transformer alone: text_conditioner\..*say part: transformer"):
        painted(folder, LoraSource(path=str(both)))
    expected = painted(folder, LoraSource(path=str(alone)))
    assert painted(folder, LoraSource(path=str(both), part="transformer")).equal(expected)


CONFIG = {"r": RANK, "lora_alpha": 6}


def as_a_transformer(folder: Path, path: Path) -> Path:
    adapted(folder, seed=1, **CONFIG).save_lora_adapter(path)
    return path


def as_a_pipeline(folder: Path, path: Path) -> Path:
    """Write as pipelines with a loader do: keys with the part's name, training metadata in the header."""
    transformer = adapted(folder, seed=1, **CONFIG)
    said = {"transformer_lora_adapter_metadata": transformer.peft_config["default"].to_dict()}
    CosmosLoraLoaderMixin.save_lora_weights(path, get_peft_model_state_dict(transformer), **said)
    return path


@pytest.mark.parametrize("write", [as_a_transformer, as_a_pipeline])
def test_a_pipeline_without_a_loader(cosmos: Path, tmp_path: Path, write: Callable[[Path, Path], Path]) -> None:
    peft, own = write_peft(adapted(cosmos, seed=1, **CONFIG), tmp_path / "peft"), write(cosmos, tmp_path / "own")
    expected, mine = (painted(cosmos, LoraSource(path=str(path))) for path in (peft, own))
    assert relative_difference(mine, expected) <= TOLERANCE
    assert relative_difference(mine, painted(cosmos)) > 0.02


def test_what_nobody_can_translate_is_told(cosmos: Path, tmp_path: Path) -> None:
    path = kohya(tmp_path / "any-name.safetensors", {"lora_unet_blocks_0_self_attn_to_q": (64, 32)})
    with pytest.raises(ValueError, match=r"no loader of adapters for Cosmos3OmniModularPipeline .*lora_unet_blocks_0"):
        painted(cosmos, LoraSource(path=str(path)))


def test_a_transformers_own_file_is_read_for_any_pipeline(sdxl: Path, tmp_path: Path) -> None:
    expected = painted(sdxl, LoraSource(path=str(write_lora(sdxl, tmp_path / "pipeline", seed=1))))
    adapted(sdxl, seed=1).save_lora_adapter(tmp_path / "own")
    assert painted(sdxl, LoraSource(path=str(tmp_path / "own"))).equal(expected)
