"""Adapters that would be applied in part, or are damaged, are refused at start with their keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import save_file

from pipelines.checkpoint import Checkpoint
from pipelines.lora.differences import as_products
from pipelines.lora.source import LoraSource
from tests.pipelines.lora.support.keys import RANK, Tensors, added, check, pair, plain, product, written

PROJ_OUT = torch.ones(16, 64)
ODD = r"factors are matrices and biases vectors, with at least one element; these are not: proj_out\.lora_"


def own(spelling: str = "A") -> Tensors:
    return pair("transformer.proj_out", *PROJ_OUT.shape, spelling=spelling)


LOST: dict[str, tuple[str, Callable[[str], Tensors], str]] = {
    "a bias that diffusers drops": (
        "flux",
        lambda _: pair("lora_unet_double_blocks_0_img_attn_proj", 64, 64) | {"lora_unet_img_in.diff_b": torch.ones(64)},
        r"has parts that nothing here reads: lora_unet_img_in\.diff_b",
    ),
    "no part's": (
        "flux",
        lambda _: pair("transformer.proj_out", 16, 64, spelling="A") | pair("refiner.0", 4, 4, spelling="A"),
        r"has refiner\.0\.lora_A\.weight, refiner\.0\.lora_B\.weight, for which no part of the model has a place",
    ),
    "another model's": (
        "flux",
        lambda _: pair("lora_unet_single_blocks_1_linear1", 576, 64),
        r"is for another model, or in a layout that is not known: diffusers cannot read it as an adapter for Flux",
    ),
    "half of LoHa": (
        "flux",
        lambda _: {"transformer.proj_out.hada_w1_a": torch.ones(1, 1)},
        "transformer.proj_out has hada_w1_a, which make no LoKr or LoHa of two matrices",
    ),
    "Tucker's core of LoKr": (
        "flux",
        lambda _: {f"transformer.proj_out.lokr_{name}": torch.ones(1, 1) for name in ("w1", "w2_a", "w2_b", "t2")},
        "lokr_t2, .*which make no LoKr or LoHa of two matrices",
    ),
    "ai-toolkit's DoRA": (
        "flux",
        lambda _: (
            pair("transformer.proj_out", 16, 64, spelling="A") | {"transformer.proj_out.magnitude": torch.ones(16)}
        ),
        "is a DoRA adapter",
    ),
    "a pair beside LoKr": (
        "flux",
        lambda _: own() | {"transformer.proj_out.lokr_w1": torch.ones(1, 1), "transformer.proj_out.lokr_w2": PROJ_OUT},
        r"transformer\.proj_out\.lora_A\.weight, .* belong to layers that have factors of LoKr or LoHa as well",
    ),
    "a half by two names": (
        "flux",
        lambda _: own() | own("down"),
        r"transformer\.proj_out\.lora_\w+\.weight and transformer\.proj_out\.lora_\w+\.weight stand for one tensor",
    ),
    "a half with and without the adapter's name": (
        "flux",
        lambda _: own() | own("default"),
        r"transformer\.proj_out\.lora_\S+ and transformer\.proj_out\.lora_\S+ stand for one tensor",
    ),
    "an alpha by two names": (
        "flux",
        lambda _: own() | {f"{prefix}proj_out.alpha": torch.tensor(2.0) for prefix in ("transformer.", "")},
        r"proj_out and \S*proj_out stand for one tensor",
    ),
    "a difference by two names": (
        "flux",
        lambda _: {f"{prefix}proj_out.diff": PROJ_OUT.clone() for prefix in ("diffusion_model.", "")},
        r"(diffusion_model\.)?proj_out\.diff and (diffusion_model\.)?proj_out\.diff stand for one tensor",
    ),
    "a block that the model has not, without the part's name": (
        "flux",
        lambda _: own() | pair("transformer_blocks.59.attn.to_q", 64, 64, spelling="A"),
        r"has transformer_blocks\.59\.attn\.to_q\.lora_A\.weight, .* for which no part of the model has a place",
    ),
    "whole numbers": (
        "flux",
        lambda _: {key: x.to(torch.int8) for key, x in own().items()},
        r"transformer\.proj_out\.lora_A\.weight in int8",
    ),
    "vectors": ("flux", lambda _: {key: x.flatten() for key, x in own().items()}, ODD),
    "a rank of 0": ("flux", lambda _: {key: x[:0] if "_A" in key else x[:, :0] for key, x in own().items()}, ODD),
    "a bias of two dims": ("flux", lambda _: own() | {"transformer.proj_out.lora_B.bias": torch.ones(16, 3)}, ODD),
    "an alpha beyond float32": (
        "flux",
        lambda _: own() | {"transformer.proj_out.alpha": torch.tensor(1e300, dtype=torch.float64)},
        "has the scale 5e[+]299 for proj_out.weight",
    ),
}


@pytest.mark.parametrize("part", ["", "transformer"])
@pytest.mark.parametrize("name", LOST)
def test_what_nothing_reads_is_named(small: Callable[[str], Path], tmp_path: Path, name: str, part: str) -> None:
    model, make, message = LOST[name]
    file = written(make(model), tmp_path)
    with pytest.raises(ValueError, match=message) as refusal:
        added(small(model), file, part)
    assert str(file) in str(refusal.value), "a model may have several"


TO_OUT, Q = "transformer_blocks.0.attn.to_out.0", "blocks.0.attn1.to_q"
ALONE: dict[str, tuple[str, ...]] = {
    "own names": ("flux", "transformer.proj_out", "proj_out", "transformer.x_embedder"),
    "a layer that is not there": ("z", *(f"layers.{block}.attention.to_q" for block in (0, 0, 9))),
    "kohya's last layer": ("flux", "lora_unet_double_blocks_0_img_attn_proj", TO_OUT, "lora_unet_final_layer_linear"),
    "kohya": ("flux", "lora_unet_double_blocks_0_img_attn_proj", TO_OUT, "lora_unet_double_blocks_0_txt_attn_proj"),
    "makers": ("wan", "diffusion_model.blocks.0.self_attn.q", Q, "diffusion_model.blocks.0.self_attn.k"),
    "a text encoder's": ("wan", "lora_unet_blocks_0_self_attn_q", Q, "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_alpha_without_factors_is_told_and_changes_nothing(
    small: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """ComfyUI ignores it, as does diffusers in some layouts; tools that drop layers leave it."""
    model, key, layer, alone = ALONE[name]
    tensors = pair(key, *plain(small(model))[f"{layer}.weight"].shape, alpha=3.0)
    file = written(tensors | {f"{alone}.alpha": torch.tensor(5.0)}, tmp_path)
    check(added(small(model), file), {f"{layer}.weight": product(tensors, key, 3.0 / RANK)})
    assert f"{file} has alphas of layers without factors, which change nothing: {alone}.alpha" in caplog.text


def test_an_alpha_under_another_name_of_a_layer_is_not_lost(small: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = own("down") | {"proj_out.alpha": torch.tensor(5.0)}
    with pytest.raises(ValueError, match=r"proj_out\.alpha"):
        added(small("flux"), written(tensors, tmp_path))
    with pytest.raises(ValueError, match="has no layers for FluxTransformer2DModel: is it a LoRA adapter"):
        added(small("flux"), written({"transformer.proj_out.alpha": torch.tensor(5.0)}, tmp_path))


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html><html>login</html>", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_file_that_is_none_is_named(small: Callable[[str], Path], tmp_path: Path, data: bytes) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"adapter\.safetensors is no safetensors file"):
        added(small("flux"), tmp_path / "adapter.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_are_named(small: Callable[[str], Path], tmp_path: Path, value: float) -> None:
    tensors = pair("transformer.proj_out", *plain(small("flux"))["proj_out.weight"].shape, spelling="A")
    tensors["transformer.proj_out.lora_B.weight"][1, 1] = value
    for name in ("", "ink"):
        source = LoraSource(path=str(written(tensors, tmp_path)), name=name)
        with pytest.raises(ValueError, match=r"not finite in transformer\.proj_out\.lora_B\.weight"):
            Checkpoint(small("flux"), loras=[source]).denoiser()


def test_a_norm_cannot_change_from_job_to_job_in_a_hand_ordered_step(
    small: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "transformer_blocks.0.attn.norm_q.weight"
    key = f"transformer.{name.removesuffix('.weight')}.diff"
    file = written({key: torch.ones(plain(small("flux"))[name].shape)}, tmp_path)
    check(added(small("flux"), file), {name: torch.ones(plain(small("flux"))[name].shape)})
    with pytest.raises(ValueError, match=rf"changes {name}.*serve it without a name"):
        Checkpoint(small("flux"), loras=[LoraSource(path=str(file), name="ink")]).denoiser()


@pytest.mark.parametrize(
    "factors",
    [
        {"w1_a": (1 << 16, 1), "w1_b": (1, 1 << 16), "w2": (1, 1)},
        {"w1": (1 << 16, 1), "w2": (1 << 15, 1)},
        {"w1": (1 << 12, 1 << 4), "w2_a": (1, 1 << 16), "w2_b": (1 << 16, 1)},
    ],
)
def test_small_factors_of_a_huge_product_are_refused(factors: dict[str, tuple[int, int]]) -> None:
    """It is refused before it is computed: a client's adapter could use all memory of a rank."""
    tensors = {f"layer.lokr_{name}": torch.zeros(shape) for name, shape in factors.items()}
    with pytest.raises(ValueError, match="layer has factors whose product is larger than the weights"):
        as_products(tensors, None)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "CorDA"])
@pytest.mark.parametrize("is_beside", [True, False], ids=["beside", "header"])
def test_adapters_for_changed_weights_are_refused(
    small: Callable[[str], Path], tmp_path: Path, start: str, is_beside: bool
) -> None:
    """PEFT initialises these from the model's weights, so they are not plain additions."""
    prefix = "base_model.model." if is_beside else "transformer."
    tensors = pair(f"{prefix}proj_out", *plain(small("flux"))["proj_out.weight"].shape, spelling="A")
    config = {"r": 2, "lora_alpha": 2, "init_lora_weights": start}
    header = {LORA_ADAPTER_METADATA_KEY: json.dumps({f"transformer.{key}": value for key, value in config.items()})}
    if is_beside:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter.safetensors", metadata=None if is_beside else header)
    with pytest.raises(ValueError, match=f"is an adapter for weights that {start} has changed"):
        added(small("flux"), tmp_path / "adapter.safetensors")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": float("inf")}, r"lora_alpha inf; it must be a finite number"),
        ({"lora_alpha": None}, r"lora_alpha None; it must be a finite number"),
        ({"alpha_pattern": {"proj_out": float("nan")}}, r"alpha_pattern of 'proj_out' nan; it must be a finite number"),
        ({"alpha_pattern": [1]}, r"alpha_pattern \[1\]; it must be an object"),
        ({"alpha_pattern": {"(": 1}}, r"a pattern in alpha_pattern that is no regular expression \(\(\)"),
        ({"alpha_pattern": {"(?i)proj": 1}}, r"a pattern in alpha_pattern that is no regular .* \(\(\?i\)proj\)"),
        ({"alpha": None, "peft_type": "OFT", "r": 0}, r"peft_type 'OFT'; only LORA, LOHA, LOKR can be added"),
    ],
)
def test_a_damaged_configuration_is_named_with_its_file(
    small: Callable[[str], Path], tmp_path: Path, config: dict[str, object], message: str
) -> None:
    tensors = pair("base_model.model.proj_out", *PROJ_OUT.shape, spelling="A")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, **config}))
    with pytest.raises(ValueError, match=rf"adapter_config\.json beside {tmp_path}.* has {message}") as refusal:
        added(small("flux"), written(tensors, tmp_path))
    assert getattr(refusal.value, "field", "file") == "config"


def test_patterns_of_translated_names_are_refused(small: Callable[[str], Path], tmp_path: Path) -> None:
    key = "base_model.model.middle_block.1.transformer_blocks.0.attn1.to_q"
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"
    tensors = pair(key, *plain(small("sdxl"))[name].shape, spelling="A")
    config = {"r": 2, "lora_alpha": 2, "alpha_pattern": {"to_q": 4}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has alphas by names of layers \(to_q\) that are translated") as refusal:
        added(small("sdxl"), written(tensors, tmp_path))
    assert getattr(refusal.value, "field", "file") == "config"
