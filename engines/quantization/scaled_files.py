"""Eight-bit weights with a scale beside them in a file, read as plain weights.

Two spellings are in use: ``LAYER.scale_weight`` (ComfyUI's ``scaled_fp8`` files) and ``LAYER.weight_scale`` (ComfyUI's
later files, LightX2V, compressed-tensors). Either is one number, or one for each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT = ".weight"
SPELLINGS = (".scale_weight", ".weight_scale")
INPUT_SCALES = (".scale_input", ".input_scale")
"""Needed for eight-bit products only, not for dequantised weights."""
MARKER = "scaled_fp8"
FORMAT = ".comfy_quant"
"""JSON as bytes, with the format of the layer's weight."""
FORMATS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Keys in a file that describe scaled weights."""

    of_weight: Mapping[str, str]
    """Scale key by weight key."""
    formats: frozenset[str]
    """Keys whose values describe a layer's format (ComfyUI)."""
    unneeded: frozenset[str]
    """Keys that dequantisation ignores."""

    @property
    def beside(self) -> frozenset[str]:
        """All keys that are no weights."""
        return frozenset(self.of_weight.values()) | self.formats | self.unneeded


def find_scales(names: Iterable[str]) -> Scales:
    """Return the scales among ``names``, the keys of all files of a model part."""
    keys = set(names)
    scales: dict[str, str] = {}
    for name in keys:
        for end in SPELLINGS:
            weight = name.removesuffix(end) + WEIGHT
            if name.endswith(end) and weight in keys:
                scales[weight] = name
    layers = {weight.removesuffix(WEIGHT) for weight in scales}
    unneeded = {name for name in keys if name.rpartition(".")[2] == MARKER}
    unneeded |= {layer + end for layer in layers for end in INPUT_SCALES} & keys
    formats = {layer + FORMAT for layer in layers} & keys
    return Scales(of_weight=scales, formats=frozenset(formats), unneeded=frozenset(unneeded))


def multiplied(weight: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return ``weight`` times ``scale`` in float32.

    ValueError, with the weight's ``name``, unless ``scale`` is one number or one per row, and for packed weights.
    """
    if not (weight.dtype.is_floating_point or weight.dtype == torch.int8):
        raise ValueError(f"{name} is packed as {weight.dtype}, and only fp8 and int8 weights with a scale are read")
    num_rows = weight.shape[0] if weight.ndim else 1
    if scale.numel() != 1 and (scale.numel() != num_rows or scale.shape[0] != num_rows):
        raise ValueError(
            f"{name} is {tuple(weight.shape)} with a scale of {tuple(scale.shape)}; a scale is one number, or one for "
            "each row"
        )
    shape = (-1, *[1] * (weight.ndim - 1)) if scale.numel() > 1 else ()
    return weight.float() * scale.float().reshape(shape)


def check_format(name: str, written: Tensor) -> None:
    """Raise ValueError if the JSON in ``written``, whose key is ``name``, names an unsupported format."""
    found = json.loads(bytes(written.to(torch.uint8).cpu().tolist()))
    if found.get("format") not in FORMATS:
        raise ValueError(f"{name} says {found}, and only {' and '.join(FORMATS)} are read: take a file in one of these")


def dequantised(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return ``tensors``, those of all files of a part, with scaled weights dequantised to ``dtype``.

    Other weights are unchanged; keys that only describe weights are dropped. ValueError like ``multiplied``.
    """
    scales = find_scales(tensors)
    for name in scales.formats:
        check_format(name, tensors[name])
    weights = {name: tensor for name, tensor in tensors.items() if name not in scales.beside}
    for name, scale in scales.of_weight.items():
        weights[name] = multiplied(tensors[name], tensors[scale], name).to(dtype)
    return weights
