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
"""For products in eight bits alone: a weight that is multiplied out needs none."""
MARKER = "scaled_fp8"
FORMAT = ".comfy_quant"
"""JSON in bytes, with the format of the layer's weight."""
FORMATS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Names in a file: ``of_weight`` has the scale of each scaled weight, ``formats`` say how weights are stored.

    ``unneeded`` are keys that a dequantised read leaves alone.
    """

    of_weight: Mapping[str, str]
    formats: frozenset[str]
    unneeded: frozenset[str]

    @property
    def beside(self) -> frozenset[str]:
        """Every key that is no weight itself."""
        return frozenset(self.of_weight.values()) | self.formats | self.unneeded


def find_scales(names: Iterable[str]) -> Scales:
    """Return what ``names``, the keys of all files of a part, say of scaled weights."""
    known = set(names)
    scales: dict[str, str] = {}
    for name in known:
        for end in SPELLINGS:
            weight = name.removesuffix(end) + WEIGHT
            if name.endswith(end) and weight in known:
                scales[weight] = name
    layers = {weight.removesuffix(WEIGHT) for weight in scales}
    unneeded = {name for name in known if name.rpartition(".")[2] == MARKER}
    unneeded |= {layer + end for layer in layers for end in INPUT_SCALES} & known
    formats = {layer + FORMAT for layer in layers} & known
    return Scales(of_weight=scales, formats=frozenset(formats), unneeded=frozenset(unneeded))


def multiplied(weight: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return ``weight`` times ``scale`` in float32.

    ValueError, which calls the weight ``name``, for a scale that is neither one number nor one for each row, or for
    packed weights.
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
    """Raise ValueError if the JSON in ``written`` names a format that is not read; ``name`` is its key."""
    found = json.loads(bytes(written.to(torch.uint8).cpu().tolist()))
    if found.get("format") not in FORMATS:
        raise ValueError(f"{name} says {found}, and only {' and '.join(FORMATS)} are read: take a file in one of these")


def dequantised(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return ``tensors``, those of all files of a part, with scaled weights multiplied out in ``dtype``.

    All others are as they were, and keys that only describe weights are gone. ValueError as ``multiplied``.
    """
    scales = find_scales(tensors)
    for name in scales.formats:
        check_format(name, tensors[name])
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales.beside}
    for name, scale in scales.of_weight.items():
        plain[name] = multiplied(tensors[name], tensors[scale], name).to(dtype)
    return plain
