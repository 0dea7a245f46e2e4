"""Weights plus low-rank products: computed in float32, rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from engines.core.additions import LowRank, LowRanks

Amounts: TypeAlias = Iterable[tuple[float, LowRank]]
"""Low-rank products of one weight, each with its amount."""
HALVES = (torch.bfloat16, torch.float16)


def added(base: Tensor, amounts: Amounts) -> Tensor:
    """Return ``base`` plus the products, float32, in its shape."""
    sum_NK = base.reshape(base.shape[0], -1)
    for amount, one in amounts:
        sum_NK = torch.add(sum_NK, _product(one, base.device), alpha=amount * one.scale)
    return sum_NK.float().view(base.shape)


def _product(one: LowRank, device: torch.device) -> Tensor:
    """Return ``up @ down``, float32. GPUs need no widening: products of two bfloat16 are exact in float32."""
    up_NR, down_RK = one.up_NR.to(device), one.down_RK.to(device)
    if device.type == "cuda" and up_NR.dtype == down_RK.dtype and up_NR.dtype in HALVES:
        return torch.mm(up_NR, down_RK, out_dtype=torch.float32)
    return up_NR.float() @ down_RK.float()


def part_of(one: LowRank, slices: Mapping[str, Any], name: str) -> LowRank:
    """Return the product for a rank's share of a parameter. ``slices`` are those of ``parallel.weight_files``."""
    place = slices.get(name)
    if place is None or not place.ranges:
        return one
    up_NR, down_RK = one.up_NR, one.down_RK
    if place.dim == 0:
        up_NR = torch.cat([up_NR[start:stop] for start, stop in place.ranges])
    else:
        down_RK = torch.cat([down_RK[:, start:stop] for start, stop in place.ranges], dim=1)
    return LowRank(up_NR=up_NR, down_RK=down_RK, scale=one.scale)


def whole_parameter(slices: Mapping[str, Any], name: str) -> str:
    """Return the name of a parameter, or of the one that it is a share of, in the whole module."""
    return str(slices[name].name) if name in slices else name


@torch.no_grad()
def merge(module: nn.Module, amounts: Iterable[tuple[float, LowRanks]], slices: Mapping[str, Any]) -> None:
    """Add to the weights of ``module``, whole or a rank's share, for good; absent parameters are skipped."""
    every = tuple(amounts)
    for name, parameter in module.named_parameters():
        whole = whole_parameter(slices, name)
        mine = [(amount, part_of(ones[whole], slices, name)) for amount, ones in every if amount and whole in ones]
        if mine and not parameter.is_meta:
            parameter.copy_(added(parameter, mine))
