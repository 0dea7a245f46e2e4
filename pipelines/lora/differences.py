"""Differences in adapter files that are no low-rank pairs: whole differences and Kronecker products (LoKr).

Whole differences of parameters in files of adapters: ``.diff`` of a weight, ``.diff_b`` of a bias, ``.diff_m`` of a
modulation (LightX2V's documents on adapters; ComfyUI reads the first two).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engines.core.model import LowRank
from pipelines.lora.translation import MAKERS_PREFIXES, shown, translate_weights

ENDS = {".diff": ".weight", ".diff_b": ".bias", ".diff_m": ".modulation"}
FLAT_NAMES = "lora_"
"""Keys whose layers are written with underscores are left to diffusers' loaders."""


def split_differences(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole differences, and all else."""
    whole = {
        key: tensor for key, tensor in tensors.items() if key.endswith(tuple(ENDS)) and not key.startswith(FLAT_NAMES)
    }
    return whole, {key: tensor for key, tensor in tensors.items() if key not in whole}


def by_parameter(differences: Mapping[str, Tensor], module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return ``differences``, which were read from ``path``, by the parameters of ``module``.

    Names are those of the model's makers, as diffusers translates them, or else diffusers' own. ValueError, with keys,
    for others, unless they are zero.
    """
    parameters = {name for name, _ in module.named_parameters()}
    origin = {_parameter(key): key for key in differences}
    makers = {name: differences[key] for name, key in origin.items()}
    found: dict[str, Tensor] = {}
    for name, value, source in translate_weights(makers, module):
        if name in parameters:
            found[name] = value
            origin.pop(source, None)
    for name, key in list(origin.items()):
        bare = name.rpartition(".")[0]
        if own := next((one for one in (name, bare) if one in parameters and one not in found), None):
            found[own] = differences[key]
            del origin[name]
    if lost := [key for key in origin.values() if differences[key].count_nonzero()]:
        raise ValueError(
            f"{path} has differences of parameters that {type(module).__name__} has not: {shown(lost)}. It is for "
            "another model, or in a layout that is not known"
        )
    return found


def _parameter(key: str) -> str:
    """The parameter's name, as the model's makers or diffusers have it."""
    prefix = next(prefix for prefix in MAKERS_PREFIXES if key.startswith(prefix))
    name = key.removeprefix(prefix)
    end = next(end for end in sorted(ENDS, key=len, reverse=True) if name.endswith(end))
    return name.removesuffix(end) + ENDS[end]


MARK = ".lokr_"
FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
"""Layers that are several ones here, whose rows follow each other."""


def low_ranks(factors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, LowRank]:
    """Return what is added, by layer. ``factors`` are ``w1``, ``w2`` or their halves, by ``LAYER.lokr_w1`` and so on;
    alphas are in them already. ``rows`` are those of the weights of layers. ValueError for keys of another form."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, factor in factors.items():
        layer, _, name = key.rpartition(MARK)
        layers.setdefault(layer, {})[name] = factor
    found: dict[str, LowRank] = {}
    for layer, parts in layers.items():
        found |= _split(layer, _product(layer, parts), rows)
    return found


def _product(layer: str, parts: Mapping[str, Tensor]) -> LowRank:
    """``kron(w1, up @ down)`` is ``kron(w1, up) @ kron(1, down)``."""
    one_AB, up_CR, down_RD = parts.get("w1"), parts.get("w2_a"), parts.get("w2_b")
    if one_AB is None and {"w1_a", "w1_b"} <= set(parts):
        one_AB = parts["w1_a"].float() @ parts["w1_b"].float()
    if "w2" in parts:
        up_CR, down_RD = parts["w2"], torch.eye(parts["w2"].shape[1])
    strange = set(parts) - {"w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b"}
    if one_AB is None or up_CR is None or down_RD is None or strange:
        raise ValueError(f"{layer} has {', '.join(sorted(parts))}, which make no LoKr of two matrices")
    up_NR = torch.kron(one_AB.float(), up_CR.float())
    down_RK = torch.kron(torch.eye(one_AB.shape[1]), down_RD.float())
    return LowRank(up_NR=up_NR, down_RK=down_RK)


def _split(layer: str, one: LowRank, rows: Mapping[str, int]) -> dict[str, LowRank]:
    place, _, last = layer.rpartition(".")
    names = [f"{place}.{name}" for name in FUSED.get(last, ())]
    if layer in rows or not names or not set(names) <= set(rows):
        return {layer: one}
    ups = torch.split(one.up_NR, [rows[name] for name in names])
    return {name: LowRank(up_NR=up_NR, down_RK=one.down_RK) for name, up_NR in zip(names, ups, strict=True)}
