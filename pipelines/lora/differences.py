"""Differences in adapter files that are no low-rank pairs: whole differences and Kronecker products (LoKr).

The keys of whole differences end in ``.diff`` for a weight, ``.diff_b`` for a bias and ``.diff_m`` for a modulation.
LightX2V's documents on adapters define them; ComfyUI reads the first two.
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
"""Prefix of keys that write layers with underscores; diffusers' loaders read these."""


def split_differences(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole differences, and all other tensors."""
    whole = {
        key: tensor for key, tensor in tensors.items() if key.endswith(tuple(ENDS)) and not key.startswith(FLAT_NAMES)
    }
    return whole, {key: tensor for key, tensor in tensors.items() if key not in whole}


def by_parameter(differences: Mapping[str, Tensor], module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return ``differences``, read from ``path``, by the parameters of ``module``.

    Names are those of the model's makers, which diffusers translates, or diffusers' own. ValueError, with keys, for
    other names, unless their values are zero.
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
        if own := next((each for each in (name, bare) if each in parameters and each not in found), None):
            found[own] = differences[key]
            del origin[name]
    if unused := [key for key in origin.values() if differences[key].count_nonzero()]:
        raise ValueError(
            f"{path} has differences of parameters that {type(module).__name__} has not: {shown(unused)}. It is for "
            "another model, or in a layout that is not known"
        )
    return found


def _parameter(key: str) -> str:
    """Return the parameter's name in the model of its makers or of diffusers."""
    prefix = next(prefix for prefix in MAKERS_PREFIXES if key.startswith(prefix))
    name = key.removeprefix(prefix)
    end = next(end for end in sorted(ENDS, key=len, reverse=True) if name.endswith(end))
    return name.removesuffix(end) + ENDS[end]


MARK = ".lokr_"
MAX_PRODUCT = 2**30
"""Elements of a product of factors, which small files can make as large as they like."""
FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
"""Layers that are several here; their rows follow each other."""


def low_ranks(factors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, LowRank]:
    """Return products by layer. ``factors``, by ``LAYER.lokr_w1`` etc., include alphas; ``rows`` are the weights'."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, factor in factors.items():
        layer, _, name = key.rpartition(MARK)
        layers.setdefault(layer, {})[name] = factor
    found: dict[str, LowRank] = {}
    for layer, parts in layers.items():
        found |= _split(layer, _product(layer, parts), rows)
    return found


def _product(layer: str, parts: Mapping[str, Tensor]) -> LowRank:
    """Return ``kron(w1, up @ down)`` as ``kron(w1, up) @ kron(1, down)``."""
    first_AB, up_CR, down_RD = parts.get("w1"), parts.get("w2_a"), parts.get("w2_b")
    if first_AB is None and {"w1_a", "w1_b"} <= set(parts):
        if len(parts["w1_a"]) * parts["w1_b"].shape[-1] > MAX_PRODUCT:
            raise ValueError(f"{layer} has LoKr factors whose product is larger than the weights of any layer")
        first_AB = parts["w1_a"].float() @ parts["w1_b"].float()
    if "w2" in parts:
        up_CR, down_RD = parts["w2"], torch.eye(parts["w2"].shape[1])
    unknown = set(parts) - {"w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b"}
    if first_AB is None or up_CR is None or down_RD is None or unknown:
        raise ValueError(f"{layer} has {', '.join(sorted(parts))}, which make no LoKr of two matrices")
    if first_AB.numel() * up_CR.numel() > MAX_PRODUCT:
        raise ValueError(f"{layer} has LoKr factors whose product is larger than the weights of any layer")
    up_NR = torch.kron(first_AB.float(), up_CR.float())
    down_RK = torch.kron(torch.eye(first_AB.shape[1]), down_RD.float())
    return LowRank(up_NR=up_NR, down_RK=down_RK)


def _split(layer: str, product: LowRank, rows: Mapping[str, int]) -> dict[str, LowRank]:
    place, _, last = layer.rpartition(".")
    names = [f"{place}.{name}" for name in FUSED.get(last, ())]
    if layer in rows or not names or not set(names) <= set(rows):
        return {layer: product}
    ups = torch.split(product.up_NR, [rows[name] for name in names])
    return {name: LowRank(up_NR=up_NR, down_RK=product.down_RK) for name, up_NR in zip(names, ups, strict=True)}
