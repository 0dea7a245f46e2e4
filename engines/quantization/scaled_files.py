"""Eight-bit weights with a scale beside them in a file, read as plain weights.

Two spellings are in use: ``LAYER.scale_weight`` (ComfyUI's ``scaled_fp8`` files) and ``LAYER.weight_scale`` (ComfyUI's
later files, LightX2V, compressed-tensors). Either is one number, or one for each row.

ComfyUI names the format of a layer in a tensor ``LAYER.comfy_quant``, or of all layers in the file's header. Columns of
eight-bit integers may have been rotated in groups (ConvRot).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

WEIGHT = ".weight"
SPELLINGS = (".scale_weight", ".weight_scale")
INPUT_SCALES = (".scale_input", ".input_scale")
"""Needed for eight-bit products only, not for dequantised weights."""
MARKER = "scaled_fp8"
FORMAT = ".comfy_quant"
"""JSON as bytes, with the format of the layer's weight."""
HEADER = "_quantization_metadata"
"""Key in a file's header of JSON with the formats of layers by name, perhaps without ``PREFIX``."""
PREFIX = "model.diffusion_model."
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
ROTATED, GROUP, USUAL_GROUP = "convrot", "convrot_groupsize", 256
"""Keys of a format: whether columns are rotated, and in groups of how many. ComfyUI takes 256 if no number is given."""


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


def multiplied(weight: Tensor, scale: Tensor, name: str, group: int = 1) -> Tensor:
    """Return ``weight`` times ``scale`` in float32, its columns rotated back in groups of ``group``.

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
    return _rotated_back(weight.float(), name, group) * scale.float().reshape(shape)


def _rotated_back(weight: Tensor, name: str, group: int) -> Tensor:
    """Return ``weight`` with each group of columns times the rotation, which is its own inverse.

    Without its scale: products of eight-bit integers and the rotation's entries are exact on every device.
    """
    if group == 1:
        return weight
    if weight.ndim != 2 or weight.shape[1] % group:
        raise ValueError(f"{name} is {tuple(weight.shape)}, and its columns cannot be rotated in groups of {group}")
    rotation_GG = _rotation(group).to(weight.device)
    return (weight.reshape(len(weight), -1, group) @ rotation_GG).reshape(weight.shape)


@cache
def _rotation(group: int) -> Tensor:
    """Return the regular Hadamard matrix of ConvRot: symmetric and orthogonal, a Kronecker power of one of 4 rows."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    power = four
    while len(power) < group:
        power = torch.kron(power, four)
    return torch.div(power, group**0.5)


def find_groups(
    scales: Scales, read: Callable[[str], Tensor], headers: Iterable[Mapping[str, str] | None]
) -> dict[str, int]:
    """Return the number of columns that are rotated together, by weight; weights that are not rotated are left out.

    ``read`` returns the tensor of a key, ``headers`` are the metadata of the files. ValueError for a format of a scaled
    weight that is not read.
    """
    formats = {
        name.removesuffix(FORMAT): (name, _parsed(name, bytes(read(name).cpu().tolist()))) for name in scales.formats
    }
    for header in headers:
        written = _parsed(HEADER, (header or {}).get(HEADER, "{}"))
        formats |= {layer: (f"{HEADER} of {layer}", each) for layer, each in dict(written.get("layers", {})).items()}
    groups = {}
    for layer, (name, written) in formats.items():
        weight = next((one for one in (f"{layer}.weight", f"{PREFIX}{layer}.weight") if one in scales.of_weight), None)
        if weight is not None and (group := _group_of(name, written)) > 1:
            groups[weight] = group
    return groups


def _parsed(name: str, written: str | bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(written))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no JSON object ({error}): the file is damaged") from error


def _group_of(name: str, written: Any) -> int:
    """Return the number of columns that a format rotates together, 1 if none. ValueError for other formats."""
    found: dict[str, Any] = {"format": written} if isinstance(written, str) else dict(written)
    if found.get("format") not in FORMATS:
        raise ValueError(f"{name} says {found}, and only {', '.join(FORMATS)} are read: take a file in one of these")
    settings = {**(found.get("params") or {}), **found}
    if not settings.get(ROTATED):
        return 1
    group = int(settings.get(GROUP, USUAL_GROUP))
    if group < 4 or 4 ** round(math.log(group, 4)) != group:
        raise ValueError(f"{name} says {found}, and {GROUP} must be a power of 4")
    return group


def dequantised(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, headers: Iterable[Mapping[str, str] | None]
) -> dict[str, Tensor]:
    """Return ``tensors``, those of all files of a part, with scaled weights dequantised to ``dtype``.

    Other weights are unchanged; keys that only describe weights are dropped. ``headers`` are the metadata of the files.
    ValueError like ``multiplied`` and ``find_groups``.
    """
    scales = find_scales(tensors)
    groups = find_groups(scales, tensors.__getitem__, headers)
    weights = {name: tensor for name, tensor in tensors.items() if name not in scales.beside}
    for name, scale in scales.of_weight.items():
        weights[name] = multiplied(tensors[name], tensors[scale], name, groups.get(name, 1)).to(dtype)
    return weights
