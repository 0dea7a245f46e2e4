"""From a file of an adapter, in any layout that diffusers reads, to pairs by the names of layers."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from pipelines.loading import resolve_file
from pipelines.lora.source import LoraSource

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""What diffusers and PEFT call them."""
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
TRANSFORMER = "transformer"
OTHER_KINDS = {"dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", ".lokr_": "LoKr", ".hada_": "LoHa"}
"""Adapters of other kinds, by what their keys contain."""
UP, DOWN, UP_BIAS, ALPHA = ".lora_B.weight", ".lora_A.weight", ".lora_B.bias", ".alpha"
NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """What a file says: tensors by ``LAYER.lora_A.weight``, ``LAYER.lora_B.weight`` and ``LAYER.lora_B.bias``.

    ``alphas`` are by layer; ``config`` is PEFT's own, if it is known.
    """

    tensors: Mapping[str, Tensor]
    alphas: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer_of(key) for key in self.tensors))

    def scale(self, layer: str, rank: int) -> float:
        """alpha / rank (rsLoRA: over its root, arXiv:2312.03732); 1 for files that say no alpha."""
        if not self.config:
            return self.alphas.get(layer, rank) / rank
        patterns = self.config.get("alpha_pattern") or {}
        alpha = _by_pattern(patterns, layer, self.config.get("lora_alpha", rank))
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def read_layers(source: LoraSource, pipeline_class: Any, module: nn.Module) -> Layers:
    """Returns what the file of ``source`` has for ``module``, the transformer or the U-Net that is meant.

    The loader of ``pipeline_class`` translates layouts of others. ValueError for files of another kind, and for keys
    that belong to other parts of the pipeline.
    """
    path = resolve_file(source.path, source.file, FILES, beside=(PEFT_CONFIG,))
    with safe_open(path, framework="pt") as opened:
        keys = list(opened.keys())
    for mark, kind in OTHER_KINDS.items():
        if strange := [key for key in keys if mark in key]:
            raise ValueError(
                f"{path} is a {kind} adapter ({shown(strange)}), and only LoRA can be added to weights here"
            )
    for prefix, config_of in CONFIGS.items():
        if _names_layers(module, (key.removeprefix(prefix) for key in keys if key.startswith(prefix))):
            tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(path).items()}
            return Layers(tensors=tensors, config=config_of(path))
    if not hasattr(pipeline_class, "lora_state_dict"):
        return _of_part(_as_saved(path, pipeline_class), source, path, TRANSFORMER)
    return _of_part(_translated(path, pipeline_class, module), source, path, _denoiser_name(pipeline_class))


def layer_of(key: str) -> str:
    return key.split(".lora_")[0]


def shown(keys: Iterable[str]) -> str:
    """Returns the first of ``keys``, and how many more there are."""
    every = sorted(keys)
    more = len(every) - NUM_SHOWN
    return ", ".join(every[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _denoiser_name(pipeline_class: Any) -> str:
    """What files call the transformer, whichever of several it is, or the U-Net."""
    return str(getattr(pipeline_class, "transformer_name", getattr(pipeline_class, "unet_name", TRANSFORMER)))


def _names_layers(module: nn.Module, keys: Iterable[str]) -> bool:
    parameters = {name for name, _ in module.named_parameters()}
    return any(key.endswith((UP, DOWN)) and f"{layer_of(key)}.weight" in parameters for key in keys)


def _as_saved(path: Path, pipeline_class: Any) -> Layers:
    """What pipelines of diffusers save: keys begin with the name of the part."""
    tensors = load_file(path)
    if not any(key.startswith(f"{TRANSFORMER}.") for key in tensors):
        raise ValueError(
            f"diffusers has no loader of adapters for {pipeline_class.__name__} that could translate {path}: save it "
            f"as its transformer does (save_lora_adapter), or as PEFT does; it has {shown(tensors)}"
        )
    return Layers(tensors=tensors, config=_written_config(path))


def _translated(path: Path, pipeline_class: Any, module: nn.Module) -> Layers:
    """Keys still begin with the names of parts."""
    read = pipeline_class.lora_state_dict
    asked = {"return_alphas": True} if "return_alphas" in inspect.signature(read).parameters else {}
    numbered = {"unet_config": getattr(module, "config", None)} if hasattr(pipeline_class, "unet_name") else {}
    try:
        tensors, *alphas, config = read(str(path), use_safetensors=True, return_lora_metadata=True, **asked, **numbered)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"diffusers cannot read {path} as an adapter for {pipeline_class.__name__}: {error}"
        ) from error
    written = {**{key: tensors[key] for key in tensors if key.endswith(ALPHA)}, **((alphas and alphas[0]) or {})}
    tensors = {key: tensor for key, tensor in tensors.items() if key not in written}
    alphas_of = {key.removesuffix(ALPHA): float(alpha) for key, alpha in written.items()}
    if tensors and not any(".lora_A" in key for key in tensors):
        tensors, alphas_of = map(convert_unet_state_dict_to_peft, (tensors, alphas_of))
    by_layer = {layer_of(key): alpha for key, alpha in alphas_of.items()}
    return Layers(tensors=tensors, alphas=by_layer, config=config or {})


def _of_part(layers: Layers, source: LoraSource, path: Path, name: str) -> Layers:
    """The layers of the transformer or the U-Net, which the file calls ``name``."""
    prefix = f"{name}."
    others = [key for key in layers.tensors if not key.startswith(prefix)]
    if others and not source.part:
        raise ValueError(
            f"{path} is not for the {name} alone: {shown(others)} belong to other parts, which are served as they "
            f"are. If the picture can do without, say part: {name}, and they are left out"
        )
    return Layers(
        tensors={key.removeprefix(prefix): x for key, x in layers.tensors.items() if key.startswith(prefix)},
        alphas={key.removeprefix(prefix): alpha for key, alpha in layers.alphas.items()},
        config={key.removeprefix(prefix): value for key, value in layers.config.items()},
    )


def _peft_config(path: Path) -> Mapping[str, Any]:
    file = path.parent / PEFT_CONFIG
    config: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return config


def _written_config(path: Path) -> Mapping[str, Any]:
    """PEFT's, in the head of a file that diffusers wrote."""
    with safe_open(path, framework="pt") as opened:
        config: Mapping[str, Any] = json.loads((opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
    return config


CONFIGS = {PEFT_PREFIX: _peft_config, "": _written_config}
"""Where the config is, by what the keys of one model's layers begin with: PEFT writes it, or a transformer alone."""


def _by_pattern(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """PEFT's patterns are ends of names, or regular expressions from their beginning where they say so."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise
