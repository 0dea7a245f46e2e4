"""Differences in adapter files that are no low-rank pairs: whole differences, LoKr and LoHa (arXiv:2309.14859).

The keys of whole differences end in ``.diff`` for a weight, ``.diff_b`` for a bias and ``.diff_m`` for a modulation.
LightX2V's documents on adapters define them; ComfyUI reads the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engines.parallel.weight_files import is_finite
from pipelines.lora.translation import (
    ALPHA,
    DOWN,
    MAKERS_PREFIXES,
    UP,
    keys_by_name,
    layer_of,
    shown,
    translate_weights,
)

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
    origin = keys_by_name(differences, _parameter)
    if all(name in parameters for name in origin):  # a translation may change the rows of names that it leaves
        return {name: differences[key] for name, key in origin.items()}
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


FACTORS = (".lokr_", ".hada_")
"""Marks of the keys of LoKr and LoHa."""
MAX_PRODUCT = 2**30
"""Elements of a product of factors, which small files can make as large as they like."""
Scale = Callable[[str], float]
"""Returns the scale of a layer by its name, from the file's configuration."""


def has_factors(tensors: Iterable[str]) -> bool:
    return any(mark in key for key in tensors for mark in FACTORS)


def as_products(
    tensors: Mapping[str, Tensor], scale_of: Scale | None, max_bytes: int | None = None
) -> dict[str, Tensor]:
    """Return ``tensors`` with the factors of LoKr and LoHa as pairs of the same products, scaled.

    Without ``scale_of`` the scale is alpha / rank (LyCORIS), and 1 without an alpha, or if no factor has a rank.
    ValueError for factors that make no product of two matrices, products that are not finite, and pairs that together
    take more than ``max_bytes``.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for key, factor in tensors.items():
        for mark in FACTORS:
            layer, found, name = key.rpartition(mark)
            if found:
                layers.setdefault(layer, {})[f"{mark[1:-1]} {name}"] = factor
    alphas = {layer: tensors[layer + ALPHA] for layer in layers if layer + ALPHA in tensors}
    pairs = {key: x for key, x in tensors.items() if layer_of(key) not in layers}
    ends = (ALPHA, *FACTORS)
    if others := [key for key in tensors if key not in pairs and not any(end in key for end in ends)]:
        raise ValueError(f"{shown(others)} belong to layers that have factors of LoKr or LoHa as well: keep one kind")
    num_bytes = 0
    for layer, parts in layers.items():
        up_NR, down_RK, rank = _product(layer, parts)
        num_bytes += up_NR.nbytes + down_RK.nbytes
        if max_bytes is not None and num_bytes > max_bytes:
            raise ValueError(
                f"the adapter's factors have products of more than {max_bytes / 2**30:.2f} GiB, the model's "
                "runtime_loras.memory_gib"
            )
        if scale_of is not None:
            scale = scale_of(layer)
        else:
            scale = float(alphas[layer]) / rank if layer in alphas and rank else 1.0
        if not (is_finite(up_NR := up_NR * scale) and is_finite(down_RK)):
            raise ValueError(f"{layer} has a product that is not finite, with the scale {scale:g}")
        pairs |= _pair(layer, up_NR, down_RK)
    return pairs


def _pair(layer: str, up_NR: Tensor, down_RK: Tensor) -> dict[str, Tensor]:
    """Return a pair by keys; names of layers without points are those of kohya's scripts, which have alphas too."""
    if "." in layer:
        return {layer + UP: up_NR, layer + DOWN: down_RK}
    ends = {".lora_up.weight": up_NR, ".lora_down.weight": down_RK, ALPHA: torch.tensor(float(len(down_RK)))}
    return {layer + end: x for end, x in ends.items()}


def _product(layer: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Return two factors of a layer's product, float32, and its rank: 0 if it is of whole matrices."""
    factors = {name.partition(" ")[2]: x.float().flatten(1) for name, x in parts.items() if x.ndim > 1}
    kinds = {name.partition(" ")[0] for name in parts}
    unknown = set(factors) - {"w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b"}
    has = {number: {f"w{number}_a", f"w{number}_b"} <= set(factors) for number in (1, 2)}
    is_lokr = kinds == {"lokr"} and all(has[number] != (f"w{number}" in factors) for number in (1, 2))
    is_loha = kinds == {"hada"} and all(has.values()) and len(factors) == 4
    if unknown or len(factors) != len(parts) or not (is_lokr or is_loha):
        names = ", ".join(sorted(name.replace(" ", "_") for name in parts))
        raise ValueError(f"{layer} has {names}, which make no LoKr or LoHa of two matrices")
    rank = len(factors["w2_b"]) if has[2] else len(factors["w1_b"]) if has[1] else 0
    make = _loha if is_loha else _lokr
    return (*make(layer, factors), rank)


def _lokr(layer: str, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the halves of ``kron(w1, w2)``: ``kron(w1, up) @ kron(1, down)``, or the whole and an identity."""
    first_AB = factors.get("w1")
    if first_AB is None:
        _check_size(layer, len(factors["w1_a"]) * factors["w1_b"].shape[1])
        first_AB = factors["w1_a"] @ factors["w1_b"]
    second = factors["w2"] if "w2" in factors else factors["w2_a"]
    _check_size(layer, first_AB.numel() * second.numel())
    up_NR = torch.kron(first_AB, second)
    if "w2_b" in factors:
        _check_size(layer, first_AB.shape[1] ** 2 * factors["w2_b"].numel())
        return up_NR, torch.kron(torch.eye(first_AB.shape[1]), factors["w2_b"])
    num_rows, num_columns = up_NR.shape
    if num_rows < num_columns:
        return torch.eye(num_rows), up_NR
    return up_NR, torch.eye(num_columns)


def _loha(layer: str, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the halves of ``(w1_a @ w1_b) * (w2_a @ w2_b)``, whose rank is the product of both ranks."""
    rows, columns = ((factors[f"w1_{half}"], factors[f"w2_{half}"]) for half in "ab")
    size = max(len(rows[0]), columns[0].shape[1])
    _check_size(layer, size * rows[0].shape[1] * rows[1].shape[1])
    up_NR = (rows[0][:, :, None] * rows[1][:, None, :]).flatten(1)
    down_RK = (columns[0][:, None, :] * columns[1][None, :, :]).flatten(0, 1)
    return up_NR, down_RK


def _check_size(layer: str, num_elements: int) -> None:
    if num_elements > MAX_PRODUCT:
        raise ValueError(f"{layer} has factors whose product is larger than the weights of any layer")
