"""Adapters with random values, in the layouts, ranks and dtypes of published ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.models.folders import diffusers_model

RANK = 64
STRENGTH = 0.02
"""Standard deviation of what an adapter adds to a layer's output, for inputs of variance 1. Pictures stay finite."""
PEFT_ENDS, KOHYA_ENDS = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Names of the tensors in a file, and the layers that have them."""

    prefix: str = "transformer."
    ends: tuple[str, str] = PEFT_ENDS
    dtype: torch.dtype = torch.bfloat16
    skips: str = r"(?!)"
    """Pattern of layers without a pair."""
    names: Sequence[tuple[str, str]] = ()
    """Patterns and replacements that turn diffusers' names into the file's, applied in order."""
    has_alphas: bool = False
    has_differences: bool = False
    """Whole differences of biases and norms beside the pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedAdapter:
    """Files of a recipe: one, or one for each of two transformers."""

    files: tuple[str, ...]
    layout: Layout


FLUX = Layout()
"""All linear layers, those of norms and embedders too: 694 MB in bfloat16 and 1388 MB in float32, as published."""
WAN_NAMES = (
    (r"attn1\.", "self_attn."),
    (r"attn2\.", "cross_attn."),
    (r"to_out\.0", "o"),
    (r"to_([qkv])", r"\1"),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"norm2", "norm3"),
)
WAN = Layout(prefix="diffusion_model.", ends=KOHYA_ENDS, dtype=torch.float32, skips=r"(?!blocks\.)", names=WAN_NAMES)
"""All linear layers of blocks: 1227 MB in float32."""
WAN_22 = Layout(**{name: getattr(WAN, name) for name in ("prefix", "ends", "dtype", "skips", "names")}, has_alphas=True)
WAN_21 = Layout(
    prefix=WAN.prefix, ends=WAN.ends, skips=WAN.skips, names=WAN.names, dtype=torch.bfloat16, has_differences=True
)
QWEN = Layout(prefix="", ends=KOHYA_ENDS, skips=r"(?!transformer_blocks\.)|.*_mod\.", has_alphas=True)
"""Attention and MLPs of blocks: 849 MB in bfloat16."""
OTHER = Layout(skips=r"(?!.*blocks\.)")

FLUX_DEV = {
    "turbo-8": PublishedAdapter(files=("diffusion_pytorch_model.safetensors",), layout=FLUX),
    "hyper-8": PublishedAdapter(
        files=("Hyper-FLUX.1-dev-8steps-lora.safetensors",), layout=Layout(dtype=torch.float32)
    ),
}
LIGHTNING = PublishedAdapter(files=("high_noise_model.safetensors", "low_noise_model.safetensors"), layout=WAN_22)
PUBLISHED: Mapping[str, Mapping[str, PublishedAdapter]] = {
    "FLUX.1-dev": FLUX_DEV,
    "Wan2.1-T2V-14B": {
        "lightx2v-4": PublishedAdapter(files=("wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors",), layout=WAN_21)
    },
    "Wan2.2-T2V-A14B": {"lightning-4": LIGHTNING},
    "Wan2.2-I2V-A14B": {"lightning-4": LIGHTNING},
    "Qwen-Image": {
        f"lightning-{num}": PublishedAdapter(files=(f"Qwen-Image-Lightning-{num}steps-V2.0.safetensors",), layout=QWEN)
        for num in (4, 8)
    },
}
"""Adapters by model and shipped recipe."""


def write_adapter(model: Path, folder: Path, adapter: PublishedAdapter, seed: int) -> list[Path]:
    """Write the files of an adapter for the transformers of ``model``, and return their paths."""
    written = []
    for number, (file, part) in enumerate(zip(adapter.files, ("transformer", "transformer_2"), strict=False)):
        with torch.device("meta"):
            module = diffusers_model(model, part)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors_of(module, adapter.layout, seed + number), path)
        written.append(path)
    return written


def tensors_of(module: nn.Module, layout: Layout, seed: int) -> dict[str, Tensor]:
    """Return the tensors of a file for ``module``, which may be on the meta device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    found = dict(_pairs(module, layout, generator))
    return found | (dict(_differences(module, layout, generator)) if layout.has_differences else {})


def _pairs(module: nn.Module, layout: Layout, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or re.match(layout.skips, name):
            continue
        rank, own = min(RANK, layer.in_features, layer.out_features), _name_in_file(name, layout)
        down_RK = _normal((rank, layer.in_features), layer.in_features**-0.5, layout, generator)
        up_NR = _normal((layer.out_features, rank), STRENGTH * rank**-0.5, layout, generator)
        yield from zip((own + end for end in layout.ends), (down_RK, up_NR), strict=True)
        if layout.has_alphas:
            yield f"{own}.alpha", torch.tensor(float(rank))


def _differences(module: nn.Module, layout: Layout, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield small differences of the vectors in blocks."""
    for name, parameter in module.named_parameters():
        layer, _, leaf = name.rpartition(".")
        if parameter.ndim == 1 and leaf in ("weight", "bias") and not re.match(layout.skips, name):
            end = ".diff" if leaf == "weight" else ".diff_b"
            yield _name_in_file(layer, layout) + end, _normal(tuple(parameter.shape), STRENGTH / 10, layout, generator)


def _name_in_file(layer: str, layout: Layout) -> str:
    for pattern, replacement in layout.names:
        layer = re.sub(pattern, replacement, layer)
    return layout.prefix + layer


def _normal(shape: tuple[int, ...], deviation: float, layout: Layout, generator: torch.Generator) -> Any:
    values = torch.randn(shape, generator=generator, device=generator.device).mul_(deviation)
    return values.to("cpu", layout.dtype)
