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

from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from pipelines.loading import resolve_file
from pipelines.lora.source import LoraSource

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""What diffusers and PEFT call them."""
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
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


def read_layers(source: LoraSource, pipeline_class: Any, parameters: Iterable[str]) -> Layers:
    """Returns what the file of ``source`` has for a transformer with these ``parameters``.

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
    own = {key.removeprefix(PEFT_PREFIX) for key in keys if key.startswith(PEFT_PREFIX)}
    if own and {f"{layer_of(key)}.weight" for key in own} & set(parameters):
        tensors = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in load_file(path).items()}
        return Layers(tensors=tensors, config=_peft_config(path))
    return _of_part(_translated(path, pipeline_class), source, path)


def layer_of(key: str) -> str:
    return key.split(".lora_")[0]


def shown(keys: Iterable[str]) -> str:
    """Returns the first of ``keys``, and how many more there are."""
    every = sorted(keys)
    more = len(every) - NUM_SHOWN
    return ", ".join(every[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _translated(path: Path, pipeline_class: Any) -> Layers:
    """Keys still begin with the names of parts."""
    if not hasattr(pipeline_class, "lora_state_dict"):
        raise ValueError(f"diffusers reads no adapters for {pipeline_class.__name__}: serve it without loras")
    knows_alphas = "return_alphas" in inspect.signature(pipeline_class.lora_state_dict).parameters
    asked = {"return_alphas": True} if knows_alphas else {}
    try:
        tensors, *alphas, config = pipeline_class.lora_state_dict(
            str(path), use_safetensors=True, return_lora_metadata=True, **asked
        )
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"diffusers cannot read {path} as an adapter for {pipeline_class.__name__}: {error}"
        ) from error
    written = {**{key: tensors[key] for key in tensors if key.endswith(ALPHA)}, **((alphas and alphas[0]) or {})}
    tensors = {key: tensor for key, tensor in tensors.items() if key not in written}
    if tensors and not any(".lora_A" in key for key in tensors):
        tensors = convert_unet_state_dict_to_peft(tensors)
    return Layers(
        tensors=tensors,
        alphas={layer_of(key.removesuffix(ALPHA)): float(alpha) for key, alpha in written.items()},
        config=config or {},
    )


def _of_part(layers: Layers, source: LoraSource, path: Path) -> Layers:
    """The layers of the transformer, which files call so whichever it is."""
    prefix = "transformer."
    others = [key for key in layers.tensors if not key.startswith(prefix)]
    if others and not source.part:
        raise ValueError(
            f"{path} is not for the transformer alone: {shown(others)} belong to other parts, which are served as they "
            "are. If the picture can do without, say part: transformer, and they are left out"
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


def _by_pattern(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """PEFT's patterns are ends of names, or regular expressions from their beginning where they say so."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise
