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
    """Return a copy of ``module`` whose planned linears hold this rank's share; all other tensors are shared.

    Raise ``ValueError`` if a layer's features are no multiple of the axis' size.
    """
    result = weight_sharing_copy(module)
    for rule in plan.linears:
        for name in matching(result, rule):
            result.set_submodule(name, _split(name, result.get_submodule(name), rule, axis))
    for table in plan.tables:
        for name in matching(result, table):
            result.set_submodule(name, SplitTable(result.get_submodule(name), table.dim, axis))
    return result


def matching(module: nn.Module, rule: LayerRule) -> list[str]:
    """Return the names of the submodules that match. ``ValueError`` if there are none."""
    return _matching_names([name for name, _ in module.named_modules()], module, rule)


def _matching_names(names: list[str], module: nn.Module, rule: LayerRule) -> list[str]:
    """Return the matching ones of ``names``, all of the module's submodules: listing them costs more than matching."""
    matches = [name for name in names if rule.matches(name)]
    if not matches:
        raise ValueError(f"the shard plan's pattern {rule.pattern!r} matches no submodule of {type(module).__name__}")
    return matches


def split_features(module: nn.Module, plan: ShardPlan) -> dict[str, int]:
    """Return the features that a tensor axis divides, by pattern. Each must be a multiple of the axis' size."""
    features: dict[str, int] = {}
    inner = dict(module.named_modules())
    for rule in plan.linears:
        layers = [inner[name] for name in _matching_names(list(inner), module, rule)]
        features[rule.pattern] = math.gcd(*(_features_unit(layer, rule) for layer in layers))
    return features


def _features_unit(layer: nn.Module, rule: ColumnLinear | RowLinear | FullWidthNorm) -> int:
    match rule:
        case ColumnLinear():
            return _segments_unit(cast(nn.Linear, layer).out_features // rule.unit, rule.segments)
        case RowLinear():
            return _segments_unit(cast(nn.Linear, layer).in_features, rule.segments)
        case FullWidthNorm():
            return int(cast(nn.RMSNorm, layer).normalized_shape[0])


def _segments_unit(features: int, segments: tuple[int, ...]) -> int:
    """Return the largest number of parts that divides each segment of ``features`` evenly."""
    return features // sum(segments) * math.gcd(*segments)


class RowSplitLinear(nn.Module):
    """A linear split by input features: partial products are summed over the ranks, then the bias is added once."""

    def __init__(self, partial: nn.Linear, bias: nn.Parameter | None, axis: Axis) -> None:
        super().__init__()
        self.partial = partial
        self.bias = bias
        self._axis = axis

    def forward(self, x: Tensor) -> Tensor:
        total = all_reduce_sum(self.partial(x), self._axis)
        return total if self.bias is None else total + self.bias


class SplitRMSNorm(nn.Module):
    """An RMS norm over features that are split over the axis."""

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
    """Returns this rank's features of the tensors that ``whole`` returns."""

    def __init__(self, whole: nn.Module, dim: int, axis: Axis) -> None:
        super().__init__()
        self.whole = whole
        self._dim, self._axis = dim, axis

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        tables: tuple[Tensor, ...] = self.whole(*args, **kwargs)
        return tuple(self.share(table, self._dim, self._axis) for table in tables)

    @staticmethod
    def share(table: Tensor, dim: int, axis: Axis) -> Tensor:
        """Return rank ``axis.index``'s part of one table. An export patches this method to mark the place."""
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
    """Return the share of each segment of the output features. A single segment is a view without own memory."""
    ranges = shares(layer.out_features, segments, axis)
    bias = None if layer.bias is None else _concatenate([layer.bias[start:stop] for start, stop in ranges], dim=0)
    return _linear(_concatenate([layer.weight[start:stop] for start, stop in ranges], dim=0), bias)


def split_rows(layer: nn.Linear, segments: tuple[int, ...], axis: Axis) -> RowSplitLinear:
    """Return the share of each segment of the input features, one after another."""
    pieces = [layer.weight[:, start:stop] for start, stop in shares(layer.in_features, segments, axis)]
    return RowSplitLinear(_linear(torch.cat(pieces, dim=1), None), layer.bias, axis)


def _concatenate(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def shares(features: int, segments: tuple[int, ...], axis: Axis) -> tuple[tuple[int, int], ...]:
    """Return a rank's half-open ranges of features when each of ``segments`` is split by itself."""
    unit, remainder = divmod(features, sum(segments))
    if remainder:
        raise ValueError(f"{features} features do not divide into segments {segments}")
    ranges, start = [], 0
    for segment in segments:
        part = share(segment * unit, axis)
        ranges.append((start + part.start, start + part.stop))
        start += segment * unit
    return tuple(ranges)


def split_norm(layer: nn.RMSNorm, axis: Axis) -> SplitRMSNorm:
    (features,) = layer.normalized_shape
    weight = None if layer.weight is None else layer.weight.detach()[share(features, axis)]
    eps = torch.finfo(torch.float32).eps if layer.eps is None else layer.eps
    return SplitRMSNorm(weight, eps, axis)


def share(features: int, axis: Axis) -> slice:
    """Return a rank's part of ``features`` that are split over the axis."""
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
