"""Reads an adapter file, in any known layout, into tensors by layer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import safe_open
from torch import Tensor, nn

from pipelines.loading import resolve_file
from pipelines.lora.differences import MARK, by_parameter, split_differences
from pipelines.lora.source import ADAPTER_FILES, PEFT_CONFIG, LoraSource
from pipelines.lora.translation import (
    ALPHA,
    DOWN,
    MAKERS_PREFIXES,
    UP,
    are_layers_of,
    as_flat_pairs,
    as_pairs,
    by_loader,
    by_weights,
    layer_of,
    read_adapter,
    shown,
)

PEFT_PREFIX = "base_model.model."
TRANSFORMER = "transformer"
OTHER_KINDS = {"dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", ".hada_": "LoHa"}
"""Unsupported kinds of adapters, by a part of their keys."""
TEXT_PARTS = ("text_encoder", "text_model", "text_conditioner")
OTHER_PARTS = (*TEXT_PARTS, "transformer", "unet", "connectors", "image_encoder", "vae", "controlnet")
"""Prefixes of the names of pipeline parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Contents of an adapter file."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """By ``LAYER.lora_A.weight``, ``LAYER.lora_B.weight`` and ``LAYER.lora_B.bias``, or ``LAYER.lokr_w1`` etc."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """By layer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """PEFT's own; empty if unknown."""
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole differences by parameter."""

    def scale(self, layer: str, rank: int) -> float:
        """Return alpha / rank (rsLoRA: over its root, arXiv:2312.03732); 1 for files without alphas."""
        if not self.config:
            return self.alphas.get(layer, rank) / rank
        patterns = self.config.get("alpha_pattern") or {}
        alpha = _by_pattern(patterns, layer, self.config.get("lora_alpha", rank))
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def kronecker_scale(self, layer: str) -> float:
        """Return the scale of a LoKr layer: 1 if a loader of diffusers has multiplied it into the factors."""
        if not self.config:
            return 1.0
        alpha, rank = (
            _by_pattern(self.config.get(f"{name}_pattern") or {}, layer, self.config.get(key, 1.0))
            for name, key in (("alpha", "alpha"), ("rank", "r"))
        )
        return float(alpha) / float(rank)


def read_layers(source: LoraSource, pipeline_class: Any, module: nn.Module) -> Layers:
    """Return the contents of the file of ``source`` for ``module``, its transformer or U-Net.

    Other layouts are translated by the loader of ``pipeline_class``, or like the weights of ``module``. ValueError for
    files of another kind, for keys of other parts of the pipeline, and for keys that nothing reads.
    """
    path = resolve_file(source.path, source.file, ADAPTER_FILES, beside=(PEFT_CONFIG,))
    tensors = read_adapter(path)
    for mark, kind in OTHER_KINDS.items():
        if others := [key for key in tensors if mark in key]:
            raise ValueError(
                f"{path} is a {kind} adapter ({shown(others)}), and only LoRA and LoKr can be added to weights here"
            )
    differences, rest = split_differences(tensors)
    whole = by_parameter(differences, module, path)
    layers = _read(rest, source, path, pipeline_class, module) if rest else Layers()
    return replace(layers, whole=whole)


def _read(tensors: Mapping[str, Tensor], source: LoraSource, path: Path, pipeline_class: Any, module: Any) -> Layers:
    if (direct := _from_own_names(tensors, path, module)) is not None:
        return direct
    try:
        layers = _select_part(_translate(tensors, path, pipeline_class, module), source, path, pipeline_class, module)
    except ValueError:
        if (other := _from_makers_names(tensors, source, path, pipeline_class, module)) is None:
            raise
        return other
    if any(MARK in key for key in tensors) or are_layers_of(module, layers.tensors):
        return layers
    return _from_makers_names(tensors, source, path, pipeline_class, module) or layers


def _from_makers_names(
    tensors: Mapping[str, Tensor], source: LoraSource, path: Path, pipeline_class: Any, module: nn.Module
) -> Layers | None:
    """Return pairs in the makers' names of layers, with points as in ComfyUI; None for other names.

    They are translated as weights are, or as the same names in kohya's spelling.
    """
    if (found := by_weights(tensors, module)) is not None:
        return Layers(tensors=found.tensors, alphas=found.alphas)
    flat = as_flat_pairs(tensors)
    if flat is None or not hasattr(pipeline_class, "lora_state_dict"):
        return None
    try:
        layers = _select_part(_translate(flat, path, pipeline_class, module), source, path, pipeline_class, module)
    except ValueError:
        return None
    return layers if are_layers_of(module, layers.tensors) else None


def _from_own_names(tensors: Mapping[str, Tensor], path: Path, module: nn.Module) -> Layers | None:
    """Return layers in the names of ``module``, with or without a prefix; None for other names."""
    for prefix, config_of in CONFIGS.items():
        if _names_layers(module, as_pairs({key: x for key, x in tensors.items() if key.startswith(prefix)}, prefix)):
            return replace(_with_alphas(as_pairs(tensors, prefix)), config=config_of(path))
    for prefix in MAKERS_PREFIXES:  # a file with alphas in its header has none among its tensors
        pairs = as_pairs(tensors, prefix)
        is_whole = all(key.startswith(prefix) for key in tensors) and not any(MARK in key for key in tensors)
        if is_whole and any(key.endswith(ALPHA) for key in pairs) and are_layers_of(module, pairs):
            return _with_alphas(pairs)
    return None


def _with_alphas(pairs: Mapping[str, Tensor]) -> Layers:
    layers = {layer_of(key) for key in pairs if not key.endswith(ALPHA)}
    alphas = {key: x for key, x in pairs.items() if key.endswith(ALPHA) and layer_of(key) in layers}
    return Layers(
        tensors={key: x for key, x in pairs.items() if key not in alphas},
        alphas={layer_of(key): float(x) for key, x in alphas.items()},
    )


def _translate(tensors: Mapping[str, Tensor], path: Path, pipeline_class: Any, module: nn.Module) -> Layers:
    """Return layers whose keys begin with a part's name, as diffusers' pipelines save or translate them."""
    if hasattr(pipeline_class, "lora_state_dict"):
        found = by_loader(path, tensors, pipeline_class, module)
        config = found.config if found.config is not None else written_config(path)
        return Layers(tensors=found.tensors, alphas=found.alphas, config=config)
    if not any(key.startswith(f"{TRANSFORMER}.") for key in tensors):
        raise ValueError(
            f"diffusers has no loader of adapters for {pipeline_class.__name__} that could translate {path}: save it "
            f"as its transformer does (save_lora_adapter), or as PEFT does; it has {shown(tensors)}"
        )
    return Layers(tensors=tensors, config=written_config(path))


def _denoiser_name(pipeline_class: Any) -> str:
    """Return the name of the transformer (any of several) or U-Net in files."""
    return str(getattr(pipeline_class, "transformer_name", getattr(pipeline_class, "unet_name", TRANSFORMER)))


def _names_layers(module: nn.Module, keys: Iterable[str]) -> bool:
    parameters = {name for name, _ in module.named_parameters()}
    return any(key.endswith((UP, DOWN)) and f"{layer_of(key)}.weight" in parameters for key in keys)


def _select_part(layers: Layers, source: LoraSource, path: Path, pipeline_class: Any, module: nn.Module) -> Layers:
    """Return the layers of the transformer or U-Net: those under its name, and those in its module's names."""
    name = _denoiser_name(pipeline_class) if hasattr(pipeline_class, "lora_state_dict") else TRANSFORMER
    if source.part and any(key.startswith(f"{source.part}.") for key in layers.tensors):
        name = source.part
    prefix = f"{name}."
    others = [key for key in layers.tensors if not key.startswith(prefix) and not are_layers_of(module, [key])]
    if unknown := [key for key in others if not key.startswith(OTHER_PARTS)]:
        raise ValueError(f"{path} has {shown(unknown)}, for which no part of the model has a place")
    if others and not source.part:
        raise ValueError(
            f"{path} is not for the {name} alone: {shown(others)} belong to other parts, which are served as they "
            f"are. If the picture can do without, say part: {name}, and they are left out"
        )
    return Layers(
        tensors={key.removeprefix(prefix): x for key, x in layers.tensors.items() if key not in others},
        alphas={key.removeprefix(prefix): alpha for key, alpha in layers.alphas.items()},
        config={key.removeprefix(prefix): value for key, value in layers.config.items()},
    )


def _peft_config(path: Path) -> Mapping[str, Any]:
    file = path.parent / PEFT_CONFIG
    config: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return config


def written_config(path: Path) -> Mapping[str, Any]:
    """Return PEFT's config from the header of a file that diffusers wrote."""
    with safe_open(path, framework="pt") as opened:
        config: Mapping[str, Any] = json.loads((opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
    return config


CONFIGS = {PEFT_PREFIX: _peft_config, "": written_config}
"""Reader of the config by prefix of keys: PEFT saved the adapter, or a transformer alone."""


def _by_pattern(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches: an end of the name, or a regular expression."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise
