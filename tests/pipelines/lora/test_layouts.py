"""Layouts of adapters that trainers and other programs write: all of a file counts, or a key is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.run import load_pipeline
from tests.pipelines.lora.support.keys import RANK, Tensors, added, check, pair, plain, product, written
from tests.pipelines.lora.support.tiny_lora import reference, request_of, write_lora

TOLERANCE = 1e-4
SPELLINGS = {
    "down": ("lora_down", "lora_up"),
    "A": ("lora_A", "lora_B"),
    "default": ("lora_A.default", "lora_B.default"),
}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def check_with_diffusers(folder: Path, file: Path) -> None:
    checkpoint = Checkpoint(folder, loras=[LoraSource(path=str(file), scale=0.8)])
    mine = load_pipeline(checkpoint).denoise(request_of(folder))["latents"]
    assert relative_difference(mine, reference(folder, request_of(folder), {file: 0.8})) <= TOLERANCE
    assert relative_difference(mine, reference(folder, request_of(folder), {})) > 0.02, "the adapter is there"


@pytest.mark.parametrize("part", ["", "transformer"])
def test_kohyas_first_and_last_layer(small: Callable[[str], Path], tmp_path: Path, part: str) -> None:
    """diffusers names them, but not as the transformer's, and loses the alpha of the last."""
    base = plain(small("flux"))
    layers = {"final_layer_linear": "proj_out", "img_in": "x_embedder", "double_blocks_0_img_attn_proj": ""}
    layers["double_blocks_0_img_attn_proj"] = "transformer_blocks.0.attn.to_out.0"
    tensors: Tensors = {}
    for key, layer in layers.items():
        tensors |= pair(f"lora_unet_{key}", *base[f"{layer}.weight"].shape, alpha=3.0)
    expected = {f"{layer}.weight": product(tensors, f"lora_unet_{key}", 3.0 / RANK) for key, layer in layers.items()}
    check(added(small("flux"), written(tensors, tmp_path), part), expected)


def distilled(folder: Path) -> tuple[Tensors, Tensors]:
    """Keys as LightX2V's distilled adapters have them, and what they add."""
    base = plain(folder)
    whole = {
        "blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
        "blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
        "blocks.1.cross_attn.o.diff_b": "blocks.1.attn2.to_out.0.bias",
        "patch_embedding.diff": "patch_embedding.weight",
        "patch_embedding.diff_b": "patch_embedding.bias",
        "blocks.0.diff_m": "blocks.0.scale_shift_table",
        "head.diff_m": "scale_shift_table",
        "time_embedding.0.diff": "condition_embedder.time_embedder.linear_1.weight",
    }
    tensors = {f"diffusion_model.{key}": torch.randn(base[name].shape) for key, name in whole.items()}
    expected = {name: tensors[f"diffusion_model.{key}"] for key, name in whole.items()}
    for block in range(2):
        pairs = pair(f"diffusion_model.blocks.{block}.self_attn.q", *base["blocks.0.attn1.to_q.weight"].shape)
        expected[f"blocks.{block}.attn1.to_q.weight"] = product(pairs, f"diffusion_model.blocks.{block}.self_attn.q")
        tensors |= pairs
    return tensors, expected


def test_whole_differences(small: Callable[[str], Path], tmp_path: Path) -> None:
    tensors, expected = distilled(small("wan"))
    file = written(tensors, tmp_path)
    check(added(small("wan"), file), expected)
    named = Checkpoint(small("wan"), loras=[LoraSource(path=str(file), name="fast")]).denoiser()
    assert named.additions["fast"]["transformer"].keys() == expected.keys()


def test_whole_differences_reach_ranks_that_read_their_share(small: Callable[[str], Path], tmp_path: Path) -> None:
    tensors, expected = distilled(small("wan"))
    source = LoraSource(path=str(written(tensors, tmp_path)))
    model = Checkpoint(small("wan"), loras=[source]).denoiser(sliced=True)
    assert model.weights is not None
    model.weights.fill("transformer", model.modules["transformer"], {})
    base = plain(small("wan"))
    read = model.modules["transformer"].state_dict()
    check({name: read[name] - base[name] for name in expected}, expected)


def test_a_difference_of_another_model_is_named(small: Callable[[str], Path], tmp_path: Path) -> None:
    tensors, expected = distilled(small("wan"))
    key = "diffusion_model.blocks.0.self_attn.gate.diff"
    with pytest.raises(ValueError, match=rf"has differences of parameters that Wan\w+ has not: {key}"):
        added(small("wan"), written(tensors | {key: torch.ones(4)}, tmp_path))
    check(added(small("wan"), written(tensors | {key: torch.zeros(4)}, tmp_path)), expected)


@pytest.mark.parametrize("model", ["klein", "qwen", "z"])
def test_pefts_name_of_the_adapter_in_keys(small: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    folder = small(model)
    name = {"klein": "transformer_blocks.0.attn.to_q", "qwen": "transformer_blocks.0.attn.to_q"}.get(
        model, "layers.0.attention.to_q"
    )
    tensors = pair(name, *plain(folder)[f"{name}.weight"].shape, spelling="default")
    check(added(folder, written(tensors, tmp_path)), {f"{name}.weight": product(tensors, name)})


@pytest.mark.parametrize("model", ["qwen", "z"])
def test_diffusers_names_with_alpha(small: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    folder = small(model)
    layers = load_file(
        write_lora(folder, tmp_path / "one", seed=1, says_alpha=False) / "pytorch_lora_weights.safetensors"
    )
    tensors = {key.removeprefix("transformer."): x for key, x in layers.items()}
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    check_with_diffusers(folder, written(tensors | {f"{name}.alpha": torch.tensor(3.0) for name in names}, tmp_path))


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model.", ""])
def test_onetrainers_layout(small: Callable[[str], Path], tmp_path: Path, prefix: str) -> None:
    name = "layers.0.attention.to_q"
    tensors = pair(prefix + name, *plain(small("z"))[f"{name}.weight"].shape, alpha=1.0)
    expected = {f"{name}.weight": product(tensors, prefix + name, 1.0 / RANK)}
    check(added(small("z"), written(tensors, tmp_path)), expected)


@pytest.mark.parametrize(("spelling", "alpha"), [("A", None), ("down", 3.0)])
def test_one_layer_for_three(small: Callable[[str], Path], tmp_path: Path, spelling: str, alpha: float | None) -> None:
    """As ComfyUI has Z-Image's attention: the rows of queries, keys and values follow each other."""
    base, place = plain(small("z")), "layers.0.attention"
    rows, columns = base[f"{place}.to_q.weight"].shape
    tensors = pair(f"diffusion_model.{place}.qkv", 3 * rows, columns, spelling=spelling, alpha=alpha)
    tensors |= pair(f"diffusion_model.{place}.out", rows, columns, spelling=spelling, alpha=alpha)
    scale = 1.0 if alpha is None else alpha / RANK
    three = torch.split(product(tensors, f"diffusion_model.{place}.qkv", scale), rows)
    expected = {f"{place}.to_{name}.weight": x for name, x in zip("qkv", three, strict=True)}
    expected[f"{place}.to_out.0.weight"] = product(tensors, f"diffusion_model.{place}.out", scale)
    check(added(small("z"), written(tensors, tmp_path)), expected)


def factors(key: str, rows: int, columns: int, *, whole: bool) -> Tensors:
    """LoKr: the second matrix whole, or of low rank, which alpha scales then."""
    left, right = torch.randn(4, 4), (rows // 4, columns // 4)
    if whole:
        second = {f"{key}.lokr_w2": 0.3 * torch.randn(right)}
    else:
        second = {f"{key}.lokr_w2_a": torch.randn(right[0], RANK), f"{key}.lokr_w2_b": torch.randn(RANK, right[1])}
    return {f"{key}.lokr_w1": left, f"{key}.alpha": torch.tensor(3.0)} | second


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("model", "key", "name"),
    [
        ("z", "diffusion_model.layers.0.attention.to_q", "layers.0.attention.to_q"),
        ("klein", "diffusion_model.double_blocks.0.img_attn.proj", "transformer_blocks.0.attn.to_out.0"),
        ("klein", "lycoris_transformer_blocks_0_attn_to_q", "transformer_blocks.0.attn.to_q"),
    ],
    ids=["ai-toolkit", "makers' names", "lycoris"],
)
def test_kronecker_products_equal_diffusers(
    small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str, whole: bool
) -> None:
    shape = plain(small(model))[f"{name}.weight"].shape
    check_with_diffusers(small(model), written(factors(key, *shape, whole=whole), tmp_path))


def test_a_kronecker_product_for_three_layers_equals_diffusers(small: Callable[[str], Path], tmp_path: Path) -> None:
    rows, columns = plain(small("klein"))["transformer_blocks.0.attn.to_q.weight"].shape
    tensors = factors("diffusion_model.double_blocks.0.img_attn.qkv", 3 * rows, columns, whole=False)
    check_with_diffusers(small("klein"), written(tensors, tmp_path))


def test_layers_that_are_written_twice_count_once(small: Callable[[str], Path], tmp_path: Path) -> None:
    place = "lora_unet_layers_0_attention"
    rows, columns = plain(small("z"))["layers.0.attention.to_q.weight"].shape
    tensors: Tensors = {}
    for name, count in (("qkv", 3), ("to_q", 1), ("to_k", 1), ("to_v", 1)):
        halves = pair(f"{place}_{name}", count * rows, columns, alpha=1.0)
        tensors |= {key.replace("lora_down", "lora.down").replace("lora_up", "lora.up"): x for key, x in halves.items()}
    assert added(small("z"), written(tensors, tmp_path)).keys() == {
        f"layers.0.attention.to_{name}.weight" for name in "qkv"
    }


def test_flux_in_comfyuis_names(small: Callable[[str], Path], tmp_path: Path) -> None:
    base, place = plain(small("flux")), "diffusion_model.double_blocks.0.img_attn"
    rows, columns = base["transformer_blocks.0.attn.to_q.weight"].shape
    tensors = pair(f"{place}.qkv", 3 * rows, columns, spelling="A")
    tensors |= pair(f"{place}.proj", rows, columns, spelling="A", alpha=3.0)
    expected = {
        f"transformer_blocks.0.attn.to_{name}.weight": x
        for name, x in zip("qkv", torch.split(product(tensors, f"{place}.qkv"), rows), strict=True)
    }
    expected["transformer_blocks.0.attn.to_out.0.weight"] = product(tensors, f"{place}.proj", 3.0 / RANK)
    check(added(small("flux"), written(tensors, tmp_path)), expected)
