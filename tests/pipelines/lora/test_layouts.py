"""Check adapter layouts of trainers and other programs: every key is applied, or an error names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.loaders.lora_conversion_utils import swap_scale_shift
from peft import LoHaConfig, LoKrConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.lora import translation
from pipelines.lora.source import LoraSource
from pipelines.run import load_pipeline
from tests.pipelines.lora.support.keys import RANK, Tensors, added, check, pair, plain, product, written
from tests.pipelines.lora.support.tiny_lora import adapted, reference, request_of, write_lora

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
    """diffusers does not map them to the transformer, and drops the alpha of the last layer."""
    base = plain(small("flux"))
    layers = {"final_layer_linear": "proj_out", "img_in": "x_embedder", "double_blocks_0_img_attn_proj": ""}
    layers["double_blocks_0_img_attn_proj"] = "transformer_blocks.0.attn.to_out.0"
    tensors: Tensors = {}
    for key, layer in layers.items():
        tensors |= pair(f"lora_unet_{key}", *base[f"{layer}.weight"].shape, alpha=3.0)
    expected = {f"{layer}.weight": product(tensors, f"lora_unet_{key}", 3.0 / RANK) for key, layer in layers.items()}
    check(added(small("flux"), written(tensors, tmp_path), part), expected)


def distilled(folder: Path) -> tuple[Tensors, Tensors]:
    """Return keys as in LightX2V's distilled adapters, and their additions to the weights."""
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
    """ComfyUI stores Z-Image's queries, keys and values as consecutive rows of one layer."""
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
    """Return LoKr factors: the second matrix whole, or of low rank, scaled by alpha."""
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


LOKR = {
    "w1 w2": "of whole matrices, whose alpha LyCORIS does not use",
    "w1 w2_a w2_b": "the usual one",
    "w1_a w1_b w2": "the first of low rank",
    "w1_a w1_b w2_a w2_b": "both of low rank",
}


def kronecker(key: str, rows: int, columns: int, kind: str, alpha: float) -> tuple[Tensors, Tensor]:
    """Return factors, and their product in LyCORIS (``lycoris/modules/lokr.py``): kron(w1, w2) * alpha / rank."""
    shapes = {"w1": (4, 2), "w2": (rows // 4, columns // 2)}
    parts, factors = Tensors(), Tensors()
    for name, (height, width) in shapes.items():
        if name in kind.split():
            parts[name] = factors[name] = 0.3 * torch.randn(height, width)
        else:
            parts |= {f"{name}_a": torch.randn(height, RANK), f"{name}_b": 0.3 * torch.randn(RANK, width)}
            factors[name] = parts[f"{name}_a"] @ parts[f"{name}_b"]
    tensors = {f"{key}.lokr_{name}": x for name, x in parts.items()} | {f"{key}.alpha": torch.tensor(alpha)}
    scale = alpha / RANK if "_a" in kind else 1.0
    return tensors, scale * torch.kron(factors["w1"], factors["w2"])


OWN_OR_MAKERS = [
    ("wan", "transformer.blocks.0.attn1.to_k", "blocks.0.attn1.to_k"),
    ("wan", "diffusion_model.blocks.0.self_attn.k", "blocks.0.attn1.to_k"),
    ("wan", "lora_unet_blocks_1_ffn_2", "blocks.1.ffn.net.2"),
    ("qwen", "lycoris_transformer_blocks_0_attn_to_k", "transformer_blocks.0.attn.to_k"),
    ("qwen", "diffusion_model.transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_k"),
    ("flux", "transformer.transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_k"),
    ("flux", "lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0"),
    ("krea", "blocks.0.attn.wk", "transformer_blocks.0.attn.to_k"),
]
"""Model, key of a layer in a file, and name of the layer."""


@pytest.mark.parametrize("kind", LOKR)
@pytest.mark.parametrize(("model", "key", "name"), OWN_OR_MAKERS)
def test_kronecker_products_have_their_scale(
    small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str, kind: str
) -> None:
    """LoKr also works where diffusers' loader does not read it."""
    rows, columns = plain(small(model))[f"{name}.weight"].shape
    tensors, expected = kronecker(key, rows, columns, kind, alpha=3.0)
    check(added(small(model), written(tensors, tmp_path)), {f"{name}.weight": expected})


def test_kronecker_products_are_written_to_no_file(
    small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products may need a thousand times the memory of their factors, and headers do not list them."""
    key, name = "lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0.weight"
    rows, columns = plain(small("flux"))[name].shape
    tensors, expected = kronecker(key, rows, columns, "w1 w2", alpha=3.0)
    save_file(tensors, tmp_path / "adapter.safetensors", metadata={"ss_network_dim": "2"})
    monkeypatch.setattr(translation, "save_file", Mock(side_effect=AssertionError("products are written")))
    check(added(small("flux"), tmp_path / "adapter.safetensors"), {name: expected})


@pytest.mark.parametrize(("model", "key", "name"), OWN_OR_MAKERS)
def test_hadamard_products(small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str) -> None:
    """LoHa is (w1_a @ w1_b) * (w2_a @ w2_b) * alpha / rank in LyCORIS and musubi-tuner."""
    rows, columns = plain(small(model))[f"{name}.weight"].shape
    halves = {f"w{number}_a": torch.randn(rows, RANK) for number in (1, 2)}
    halves |= {f"w{number}_b": torch.randn(RANK, columns) for number in (1, 2)}
    tensors = {f"{key}.hada_{half}": x for half, x in halves.items()} | {f"{key}.alpha": torch.tensor(3.0)}
    expected = (halves["w1_a"] @ halves["w1_b"]) * (halves["w2_a"] @ halves["w2_b"]) * 3.0 / RANK
    check(added(small(model), written(tensors, tmp_path)), {f"{name}.weight": expected})


@pytest.mark.parametrize("kind", ["A", "down", "w1 w2_a w2_b"])
@pytest.mark.parametrize("prefix", ["diffusion_model.", "base_model.model.", ""])
def test_halves_of_a_modulation_change_places(
    small: Callable[[str], Path], tmp_path: Path, prefix: str, kind: str
) -> None:
    """FLUX.2's own files store shift before scale; diffusers' loader does not swap them."""
    base, key = plain(small("klein")), f"{prefix}final_layer.adaLN_modulation.1"
    rows, columns = base["norm_out.linear.weight"].shape
    if kind in SPELLINGS:
        tensors = pair(key, rows, columns, spelling=kind)
        expected = product(tensors, key)
    else:
        tensors, expected = kronecker(key, rows, columns, kind, alpha=3.0)
    other = "double_blocks.0.img_attn.proj"
    tensors |= pair(prefix + other, *base["transformer_blocks.0.attn.to_out.0.weight"].shape, spelling="A")
    check(
        added(small("klein"), written(tensors, tmp_path)),
        {
            "norm_out.linear.weight": swap_scale_shift(expected),
            "transformer_blocks.0.attn.to_out.0.weight": product(tensors, prefix + other),
        },
    )


@pytest.mark.parametrize("prefix", ["diffusion_model.", "transformer.", ""])
def test_own_names_are_not_translated(small: Callable[[str], Path], tmp_path: Path, prefix: str) -> None:
    """MiniMax-H3's own files store the halves of this layer swapped, under another name."""
    name, other = (f"transformer_blocks.{number}.ff.net.0.proj" for number in (0, 1))
    shape = plain(small("minimax"))[f"{name}.weight"].shape
    tensors = pair(prefix + name, *shape, spelling="A")
    expected = {f"{name}.weight": product(tensors, prefix + name), f"{other}.weight": torch.randn(shape)}
    tensors[f"{prefix}{other}.diff"] = expected[f"{other}.weight"]
    check(added(small("minimax"), written(tensors, tmp_path)), expected)


def test_names_in_a_file_of_diffusers_are_not_translated(small: Callable[[str], Path], tmp_path: Path) -> None:
    """The header has a configuration. PEFT gives the expected addition to each layer."""
    folder = small("minimax")
    layers = [pair for pair in adapted(folder, seed=1).named_modules() if hasattr(pair[1], "get_delta_weight")]
    expected = {f"{name}.weight": layer.get_delta_weight("default").detach() for name, layer in layers}
    found = added(folder, write_lora(folder, tmp_path / "adapter", seed=1))
    check({name: x for name, x in found.items() if name in expected}, expected)


@pytest.mark.parametrize(
    ("model", "key", "name"),
    [
        ("wan", "lora_unet_blocks_1_self_attn_q", "blocks.1.attn1.to_q"),
        ("wan", "lora_unet__blocks_0_cross_attn_k", "blocks.0.attn2.to_k"),
        ("wan", "lora_unet_time_embedding_0", "condition_embedder.time_embedder.linear_1"),
        ("krea", "lora_unet_txtfusion_refiner_blocks_0_mlp_down", "text_fusion.refiner_blocks.0.ff.down"),
        ("qwen", "lora_transformer_transformer_blocks_0_img_mlp_net_2", "transformer_blocks.0.img_mlp.net.2"),
        ("flux", "lycoris_single_transformer_blocks_0_proj_mlp", "single_transformer_blocks.0.proj_mlp"),
    ],
    ids=["musubi-tuner", "VideoX-Fun", "an embedder", "Krea 2", "OneTrainer", "SimpleTuner"],
)
def test_names_with_underscores(small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str) -> None:
    """A file may have some of the layers, where diffusers' loader needs all or none."""
    tensors = pair(key, *plain(small(model))[f"{name}.weight"].shape, alpha=3.0)
    check(added(small(model), written(tensors, tmp_path)), {f"{name}.weight": product(tensors, key, 3.0 / RANK)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pairs_in_eight_bits(small: Callable[[str], Path], tmp_path: Path, dtype: torch.dtype) -> None:
    name = "layers.0.attention.to_q"
    halves = pair(f"diffusion_model.{name}", *plain(small("z"))[f"{name}.weight"].shape, spelling="A")
    tensors = {key: x.to(dtype) for key, x in halves.items()}
    expected = product({key: x.float() for key, x in tensors.items()}, f"diffusion_model.{name}")
    check(added(small("z"), written(tensors, tmp_path)), {f"{name}.weight": expected})


@pytest.mark.parametrize(("rslora", "scale"), [(False, 3.0 / RANK), (True, 3.0 / RANK**0.5)])
@pytest.mark.parametrize(
    ("model", "key", "name"),
    [
        ("klein", "double_blocks.0.img_attn.proj", "transformer_blocks.0.attn.to_out.0"),
        ("wan", "blocks.0.self_attn.o", "blocks.0.attn1.to_out.0"),
        ("flux", "final_layer.linear", "proj_out"),
        ("flux", "double_blocks.0.img_attn.proj", "transformer_blocks.0.attn.to_out.0"),
    ],
)
def test_pefts_configuration_is_for_the_makers_names_too(
    small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str, rslora: bool, scale: float
) -> None:
    key = f"base_model.model.{key}"
    tensors = pair(key, *plain(small(model))[f"{name}.weight"].shape, spelling="A")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "use_rslora": rslora}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check(added(small(model), tmp_path), {f"{name}.weight": product(tensors, key, scale)})


@pytest.mark.parametrize("part", ["", "transformer."])
@pytest.mark.parametrize("prefix", ["", "transformer.", "diffusion_model."])
def test_the_configuration_in_a_header_counts_with_and_without_the_parts_name(
    small: Callable[[str], Path], tmp_path: Path, prefix: str, part: str
) -> None:
    """diffusers renames keys and header together; other tools rename only the keys."""
    name = "proj_out"
    tensors = pair(prefix + name, *plain(small("flux"))[f"{name}.weight"].shape, spelling="A")
    config = {f"{part}r": RANK, f"{part}lora_alpha": 3}
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file, metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(config)})
    check(added(small("flux"), file), {f"{name}.weight": product(tensors, prefix + name, 3.0 / RANK)})
    key = "diffusion_model.final_layer.adaLN_modulation.1"
    tensors = pair(key, *plain(small("klein"))["norm_out.linear.weight"].shape, spelling="A")
    save_file(tensors, file, metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(config)})
    expected = swap_scale_shift(product(tensors, key, 3.0 / RANK))
    check(added(small("klein"), file), {"norm_out.linear.weight": expected})


BOTH = [
    ("qwen", "diffusion_model.transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_k"),
    ("qwen", "lora_unet_transformer_blocks_0_attn_to_k", "transformer_blocks.0.attn.to_k"),
    ("z", "transformer.layers.0.attention.to_k", "layers.0.attention.to_k"),
    ("klein", "diffusion_model.transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_k"),
    ("krea", "diffusion_model.blocks.0.attn.wk", "transformer_blocks.0.attn.to_k"),
    ("wan", "diffusion_model.blocks.0.attn1.to_k", "blocks.0.attn1.to_k"),
    ("sdxl", "lora_unet_mid_block_attentions_0_proj_in", "mid_block.attentions.0.proj_in"),
]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("part", ["", "transformer."])
@pytest.mark.parametrize(("model", "key", "name"), BOTH)
def test_an_alpha_counts_once_beside_the_same_in_the_header(
    small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str, part: str, rslora: bool
) -> None:
    """SimpleTuner writes both layouts for ComfyUI (``lora_format``)."""
    spelling = "down" if "lora_unet" in key else "A"
    tensors = pair(key, *plain(small(model))[f"{name}.weight"].shape, spelling=spelling, alpha=3.0)
    config = {f"{part}r": RANK, f"{part}lora_alpha": 3, f"{part}use_rslora": rslora}
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file, metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(config)})
    scale = 3.0 / (RANK**0.5 if rslora else RANK)
    check(added(small(model), file), {f"{name}.weight": product(tensors, key, scale)})


@pytest.mark.parametrize("kind", [LoKrConfig, LoHaConfig])
@pytest.mark.parametrize("place", ["beside", "header", "part's header"])
def test_pefts_lokr_and_loha_have_the_scale_of_their_configuration(
    small: Callable[[str], Path], tmp_path: Path, kind: type[LoKrConfig | LoHaConfig], place: str
) -> None:
    """The reference is PEFT's own sum. Files of diffusers have the configuration in the header."""
    module: Any = next(iter(Checkpoint(small("flux")).denoiser().modules.values()))
    names = [f"transformer_blocks.0.attn.to_{end}" for end in "qk"]
    config = kind(
        r=RANK, alpha=3, target_modules=names, init_weights=False, rank_pattern={names[1]: 4}, alpha_pattern={"to_k": 5}
    )
    model = get_peft_model(module, config)
    expected = {f"{name}.weight": module.get_submodule(name).get_delta_weight("default") for name in names}
    model.save_pretrained(str(tmp_path))
    file, beside = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    if place != "beside":
        part = "transformer." if place == "part's header" else ""
        settings = {f"{part}{key}": value for key, value in json.loads(beside.read_text()).items()}
        tensors = {key.replace("base_model.model.", part): x for key, x in load_file(file).items()}
        save_file(tensors, file, metadata={LORA_ADAPTER_METADATA_KEY: json.dumps(settings)})
        beside.unlink()
    check(added(small("flux"), file), expected)


@pytest.mark.parametrize("spelling", ["A", "down"])
@pytest.mark.parametrize(
    ("model", "key", "name"),
    [
        ("krea", "blocks.0.attn.wk", "transformer_blocks.0.attn.to_k"),
        ("wan", "blocks.0.self_attn.k", "blocks.0.attn1.to_k"),
        ("klein", "transformer.transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_k"),
        ("hunyuan", "transformer.transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_k"),
    ],
)
def test_an_alpha_of_all_layers_in_a_header_hinders_nothing(
    small: Callable[[str], Path], tmp_path: Path, model: str, key: str, name: str, spelling: str
) -> None:
    """diffusers' loaders of these models read neither the alpha nor, in part, these names."""
    alpha = 3.0 if spelling == "down" else None
    tensors = pair(key, *plain(small(model))[f"{name}.weight"].shape, spelling=spelling, alpha=alpha)
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file, metadata={"alpha": "8"})
    scale = 1.0 if alpha is None else alpha / RANK
    check(added(small(model), file), {f"{name}.weight": product(tensors, key, scale)})
