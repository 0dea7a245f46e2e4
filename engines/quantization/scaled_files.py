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
FOUR_BITS = "nvfp4"
BLOCKS = {FOUR_BITS: 16, "mxfp8": 32}
"""Formats with a scale for each block of so many columns, in the order that cuBLAS reads."""
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", *BLOCKS)
SECOND, SMOOTHED = ".weight_scale_2", ".pre_quant_scale"
"""Keys of ``nvfp4``: the scale of all blocks, and the optional factors of a layer's input."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of ``nvfp4`` by its lower three bits. The highest bit is the sign."""
TILE = (32, 4, 4)
"""Rows of a tile of scales, as 4 times 32, and its columns, in the order of memory: row in 32, 32s, column."""
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
    more: frozenset[str]
    """Keys of further scales, which ``nvfp4`` alone has."""

    @property
    def beside(self) -> frozenset[str]:
        """All keys that are no weights."""
        return frozenset(self.of_weight.values()) | self.formats | self.unneeded | self.more


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a scaled weight is more than a product."""

    group: int = 1
    """Number of columns that are rotated together."""
    blocks: str = ""
    """One of ``BLOCKS``, or empty."""


PLAIN = Format()


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
    formats = frozenset(name for name in keys if name.endswith(FORMAT))
    more = frozenset(layer + end for layer in layers for end in (SECOND, SMOOTHED)) & keys
    return Scales(of_weight=scales, formats=formats, unneeded=frozenset(unneeded), more=more)


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


def find_formats(
    scales: Scales, read: Callable[[str], Tensor], headers: Iterable[Mapping[str, str] | None]
) -> dict[str, Format]:
    """Return the formats of weights that are no plain products.

    ``read`` returns the tensor of a key, ``headers`` are the metadata of the files. ValueError for a format of a scaled
    weight that is not read.
    """
    formats: dict[str, tuple[str, Any]] = {
        name.removesuffix(FORMAT): (name, _parsed(name, bytes(read(name).cpu().tolist()))) for name in scales.formats
    }
    for header in headers:
        written = _parsed(HEADER, (header or {}).get(HEADER, "{}"))
        formats |= {layer: (f"{HEADER} of {layer}", each) for layer, each in dict(written.get("layers", {})).items()}
    found: dict[str, Format] = {}
    for layer, (name, each) in formats.items():
        weight = next((one for one in (f"{layer}.weight", f"{PREFIX}{layer}.weight") if one in scales.of_weight), None)
        if weight is not None or name in scales.formats:
            settings: dict[str, Any] = {"format": each} if isinstance(each, str) else dict(each)
            if settings.get("format") not in FORMATS:
                raise ValueError(
                    f"{name} says {settings}, and only {', '.join(FORMATS)} are read: take a file in one of these"
                )
            found |= {weight: _format_of(name, settings)} if weight is not None else {}
    for key in scales.more:
        weight = key.removesuffix(SECOND).removesuffix(SMOOTHED) + WEIGHT
        if found.get(weight, PLAIN).blocks != FOUR_BITS:
            raise ValueError(f"{key} belongs to {FOUR_BITS}, which the format of {weight} is not: take another file")
    return found


def _parsed(name: str, written: str | bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(written))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no JSON object ({error}): the file is damaged") from error


def _format_of(name: str, written: Mapping[str, Any]) -> Format:
    """Return a known format. ValueError for columns that are rotated in other groups than powers of 4."""
    if written["format"] in BLOCKS:
        return Format(blocks=written["format"])
    settings = {**(written.get("params") or {}), **written}
    if not settings.get(ROTATED):
        return PLAIN
    group = int(settings.get(GROUP, USUAL_GROUP))
    if group < 4 or 4 ** round(math.log(group, 4)) != group:
        raise ValueError(f"{name} says {written}, and {GROUP} must be a power of 4")
    return Format(group=group)


def of_blocks(name: str, kind: str, scales: Scales, read: Callable[[str], Tensor]) -> Tensor:
    """Return the whole weight ``name`` times the scales of its blocks, in float32. ValueError if they do not fit it."""
    weight, layer = read(name), name.removesuffix(WEIGHT)
    scale = read(scales.of_weight[name]).to(weight.device)
    if kind == FOUR_BITS:
        if layer + SECOND not in scales.more:
            raise ValueError(f"{name} is {kind} without {layer}{SECOND}: the file is damaged")
        codes = torch.stack([weight >> 4, weight & 15], -1).flatten(-2).int()  # the first of two is in the upper bits
        values = torch.tensor([*VALUES, *(-x for x in VALUES)], device=weight.device)[codes]
        factor = scale.view(torch.float8_e4m3fn).float() * read(layer + SECOND).to(weight.device).float()
    else:
        values, factor = weight.float(), scale.view(torch.float8_e8m0fnu).float()
    num_rows, num_blocks = len(values), values.shape[1] // BLOCKS[kind]
    high, wide = -(-num_rows // 128), -(-num_blocks // 4)
    if values.shape[1] % BLOCKS[kind] or factor.numel() != high * wide * math.prod(TILE):
        raise ValueError(f"{name} is {tuple(values.shape)}, and its scales of {tuple(scale.shape)} do not fit {kind}")
    tiles = factor.reshape(high, wide, *TILE).permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    out = (values.reshape(num_rows, num_blocks, -1) * tiles[:num_rows, :num_blocks, None]).flatten(1)
    return out * read(layer + SMOOTHED).to(weight.device).float() if layer + SMOOTHED in scales.more else out


def scaled_weight(name: str, scales: Scales, formats: Mapping[str, Format], read: Callable[[str], Tensor]) -> Tensor:
    """Return the whole weight ``name`` that a file stands for, in float32, on the device of what ``read`` returns."""
    written = formats.get(name, PLAIN)
    if written.blocks:
        return of_blocks(name, written.blocks, scales, read)
    weight = read(name)
    return multiplied(weight, read(scales.of_weight[name]).to(weight.device), name, written.group)


def dequantised(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, headers: Iterable[Mapping[str, str] | None]
) -> dict[str, Tensor]:
    """Return ``tensors``, those of all files of a part, with scaled weights dequantised to ``dtype``.

    Other weights are unchanged; keys that only describe weights are dropped. ``headers`` are the metadata of the files.
    ValueError like ``multiplied``, and for formats that are not read.
    """
    scales = find_scales(tensors)
    formats = find_formats(scales, tensors.__getitem__, headers)
    weights = {name: tensor for name, tensor in tensors.items() if name not in scales.beside}
    for name in scales.of_weight:
        weights[name] = scaled_weight(name, scales, formats, tensors.__getitem__).to(dtype)
    return weights
