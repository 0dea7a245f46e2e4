"""LoKr: what is added to a weight as a Kronecker product (Yeh et al. 2023, arXiv:2309.14859), as a low-rank one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.core.additions import LowRank

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
