"""Tensor parallelism: linears split by column or row over an axis (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from engines.core.shard_plan import ColumnLinear, FullWidthNorm, LayerRule, RowLinear, ShardPlan
from engines.parallel.collectives import Axis, all_reduce_sum
from engines.parallel.copies import weight_sharing_copy


def split_weights(module: nn.Module, plan: ShardPlan, axis: Axis) -> nn.Module:
    """A copy of ``module`` in which the plan's linears hold this rank's share; all other tensors are shared with it.

    Raises ``ValueError`` if a layer's features are no multiple of the axis' size.
    """
    mine = weight_sharing_copy(module)
    for rule in plan.linears:
        for name in matching(mine, rule):
            mine.set_submodule(name, _split(name, mine.get_submodule(name), rule, axis))
    for table in plan.tables:
        for name in matching(mine, table):
            mine.set_submodule(name, SplitTable(mine.get_submodule(name), table.dim, axis))
    return mine


def matching(module: nn.Module, rule: LayerRule) -> list[str]:
    """Names of the submodules that fit. ``ValueError`` if there is none."""
    return _fitting([name for name, _ in module.named_modules()], module, rule)


def _fitting(names: list[str], module: nn.Module, rule: LayerRule) -> list[str]:
    """Those of ``names``, all of the module's submodules, that fit: listing them takes longer than comparing them."""
    fitting = [name for name in names if rule.matches(name)]
    if not fitting:
        raise ValueError(f"the shard plan's pattern {rule.pattern!r} fits no submodule of {type(module).__name__}")
    return fitting


def split_features(module: nn.Module, plan: ShardPlan) -> dict[str, int]:
    """What a tensor axis divides, by the plan's patterns: all of these must be multiples of its size."""
    features: dict[str, int] = {}
    inner = dict(module.named_modules())
    for rule in plan.linears:
        layers = [inner[name] for name in _fitting(list(inner), module, rule)]
        features[rule.pattern] = math.gcd(*(_divided(layer, rule) for layer in layers))
    return features


def _divided(layer: nn.Module, rule: ColumnLinear | RowLinear | FullWidthNorm) -> int:
    match rule:
        case ColumnLinear():
            return _common(cast(nn.Linear, layer).out_features // rule.unit, rule.segments)
        case RowLinear():
            return _common(cast(nn.Linear, layer).in_features, rule.segments)
        case FullWidthNorm():
            return int(cast(nn.RMSNorm, layer).normalized_shape[0])


def _common(features: int, segments: tuple[int, ...]) -> int:
    """What divides each segment of ``features`` by itself."""
    return features // sum(segments) * math.gcd(*segments)


class RowSplitLinear(nn.Module):
    """A linear whose ranks hold different input features: partial products are summed, then the bias is added once."""

    def __init__(self, partial: nn.Linear, bias: nn.Parameter | None, axis: Axis) -> None:
        super().__init__()
        self.partial = partial
        self.bias = bias
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        total = all_reduce_sum(self.partial(x), self._axis)
        return total if self.bias is None else total + self.bias


class SplitRMSNorm(nn.Module):
    """An RMS norm over features that are spread over the axis."""

    def __init__(self, weight: Tensor | None, eps: float, axis: Axis) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        total = all_reduce_sum(wide.square().sum(-1, keepdim=True), self._axis)
        normed = wide * torch.rsqrt(total / (x.shape[-1] * self._axis.size) + self._eps)
        return (normed if self.weight is None else normed * self.weight).to(x.dtype)


class SplitTable(nn.Module):
    """This rank's features of what ``whole`` gives, a tuple of tensors."""

    def __init__(self, whole: nn.Module, dim: int, axis: Axis) -> None:
        super().__init__()
        self.whole = whole
        self._dim, self._axis = dim, axis

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        tables: tuple[Tensor, ...] = self.whole(*args, **kwargs)
        return tuple(self.share(table, self._dim, self._axis) for table in tables)

    @staticmethod
    def share(table: Tensor, dim: int, axis: Axis) -> Tensor:
        """Returns what rank ``axis.index`` holds of one of them; an export leaves a mark in its place."""
        return table.tensor_split(axis.size, dim)[axis.index]


def _split(name: str, layer: nn.Module, rule: ColumnLinear | RowLinear | FullWidthNorm, axis: Axis) -> nn.Module:
    try:
        match rule:
            case ColumnLinear():
                return split_columns(cast(nn.Linear, layer), rule.segments, axis)
            case RowLinear():
                return split_rows(cast(nn.Linear, layer), rule.segments, axis)
            case FullWidthNorm():
                return split_norm(cast(nn.RMSNorm, layer), axis)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def split_columns(layer: nn.Linear, segments: tuple[int, ...], axis: Axis) -> nn.Linear:
    """The share of each segment of the output features: of one alone a view, no memory of its own."""
    ranges = shares(layer.out_features, segments, axis)
    bias = None if layer.bias is None else _joined([layer.bias[start:stop] for start, stop in ranges], dim=0)
    return _linear(_joined([layer.weight[start:stop] for start, stop in ranges], dim=0), bias)


def split_rows(layer: nn.Linear, segments: tuple[int, ...], axis: Axis) -> RowSplitLinear:
    """The share of each segment of the input features, one after another."""
    pieces = [layer.weight[:, start:stop] for start, stop in shares(layer.in_features, segments, axis)]
    return RowSplitLinear(_linear(torch.cat(pieces, dim=1), None), layer.bias, axis)


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def shares(features: int, segments: tuple[int, ...], axis: Axis) -> tuple[tuple[int, int], ...]:
    """Which features a rank has, half-open ranges, if each of ``segments`` of them is split by itself."""
    unit, rest = divmod(features, sum(segments))
    if rest:
        raise ValueError(f"{features} features do not divide into segments {segments}")
    ranges, start = [], 0
    for segment in segments:
        mine = share(segment * unit, axis)
        ranges.append((start + mine.start, start + mine.stop))
        start += segment * unit
    return tuple(ranges)


def split_norm(layer: nn.RMSNorm, axis: Axis) -> SplitRMSNorm:
    (features,) = layer.normalized_shape
    weight = None if layer.weight is None else layer.weight.detach()[share(features, axis)]
    eps = torch.finfo(torch.float32).eps if layer.eps is None else layer.eps
    return SplitRMSNorm(weight, eps, axis)


def share(features: int, axis: Axis) -> slice:
    """A rank's part of ``features`` that are split over the axis."""
    if features % axis.size:
        raise ValueError(f"{features} features cannot be split over {axis.size} ranks of the tensor axis")
    size = features // axis.size
    return slice(axis.index * size, (axis.index + 1) * size)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
