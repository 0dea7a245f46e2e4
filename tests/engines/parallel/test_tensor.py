"""Split layers, joined by hand, equal the whole layer; layers that cannot be split raise an error."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from engines.core.shard_plan import ColumnLinear, FeatureTable, RowLinear, ShardPlan
from engines.parallel.collectives import Axis
from engines.parallel.copies import weight_sharing_copy
from engines.parallel.tensor import (
    RowSplitLinear,
    split_columns,
    split_features,
    split_norm,
    split_rows,
    split_weights,
)


def axis(index: int, size: int = 3) -> Axis:
    return Axis(ranks=tuple(range(size)), index=index)


def test_columns_share_memory_and_join_to_the_whole() -> None:
    layer, x = nn.Linear(5, 12), torch.randn(2, 5)
    parts = [split_columns(layer, (1,), axis(index)) for index in range(3)]
    torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), layer(x))
    assert parts[1].weight.data_ptr() == layer.weight[4:].data_ptr()


@pytest.mark.parametrize("segments", [(1, 1), (1, 1, 1, 2), (12, 18)])
@pytest.mark.parametrize("bias", [True, False])
def test_columns_of_every_segment_join_to_the_whole(segments: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(5, 30, bias=bias), torch.randn(2, 5)
    unit = 30 // sum(segments)
    outputs = [split_columns(layer, segments, axis(index))(x) for index in range(3)]
    pieces = [torch.split(out, [segment * unit // 3 for segment in segments], dim=-1) for out in outputs]
    wholes = [torch.cat(parts, dim=-1) for parts in zip(*pieces, strict=True)]
    torch.testing.assert_close(torch.cat(wholes, dim=-1), layer(x))


@pytest.mark.parametrize("segments", [(1,), (1, 4), (2, 1, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_every_segment_sum_to_the_whole(segments: tuple[int, ...], bias: bool) -> None:
    """Each segment of the input was split on its own before they were concatenated; the bias is added once."""
    layer, x = nn.Linear(30, 7, bias=bias), torch.randn(2, 30)
    unit = 30 // sum(segments)
    pieces = torch.split(x, [segment * unit for segment in segments], dim=-1)
    inputs = [torch.cat([piece.chunk(3, dim=-1)[index] for piece in pieces], dim=-1) for index in range(3)]
    parts = [split_rows(layer, segments, axis(index)) for index in range(3)]
    partial = [part.partial(given) for part, given in zip(parts, inputs, strict=True)]
    with patch("engines.parallel.tensor.all_reduce_sum", lambda x, axis: sum(partial)):
        torch.testing.assert_close(parts[0](inputs[0]), layer(x))


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_norm_over_all_ranks(eps: float | None) -> None:
    layer, x = nn.RMSNorm(12, eps=eps), torch.randn(2, 12)
    nn.init.normal_(layer.weight)
    shares = x.chunk(3, dim=-1)
    total = x.square().sum(-1, keepdim=True)
    with patch("engines.parallel.tensor.all_reduce_sum", lambda x, axis: total):
        parts = [split_norm(layer, axis(index))(share) for index, share in enumerate(shares)]
    torch.testing.assert_close(torch.cat(parts, dim=-1), layer(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 12), nn.Linear(12, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(self.norm(x)))
        return down


def plan(*linears: ColumnLinear | RowLinear) -> ShardPlan:
    return ShardPlan(streams=("x",), blocks=("0",), shards=(), gathers=(), linears=linears)


def test_original_stays_whole_and_the_rest_is_shared() -> None:
    module = nn.Sequential(Block(), Block())
    mine = split_weights(module, plan(ColumnLinear(pattern="*.up"), RowLinear(pattern="*.down")), axis(1))
    assert isinstance(mine.get_submodule("1.down"), RowSplitLinear)
    assert mine.get_submodule("0.up").out_features == 4
    assert module.get_submodule("0.up").out_features == 12
    assert mine.get_submodule("0.norm").weight is module.get_submodule("0.norm").weight


@pytest.mark.parametrize(
    ("rule", "size", "message"),
    [
        (ColumnLinear(pattern="*.across"), 2, r"pattern '\*.across' matches no submodule of Sequential"),
        (ColumnLinear(pattern="*.up"), 5, r"0.up: 12 features cannot be split over 5 ranks"),
        (RowLinear(pattern="*.down", segments=(1, 4)), 2, r"12 features do not divide into segments \(1, 4\)"),
        (ColumnLinear(pattern="*.up", segments=(1, 4)), 2, r"12 features do not divide into segments \(1, 4\)"),
        (ColumnLinear(pattern="*.up", segments=(1, 3)), 2, r"0.up: 3 features cannot be split over 2 ranks"),
    ],
)
def test_what_cannot_be_split(rule: ColumnLinear | RowLinear, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_weights(nn.Sequential(Block()), plan(rule), axis(0, size))


def test_heads_stay_whole_and_segments_count_each_by_itself() -> None:
    module = nn.Sequential(Block())
    several = (ColumnLinear(pattern="*.up", unit=6), RowLinear(pattern="*.down", segments=(1, 2)))
    assert split_features(module, plan(*several)) == {"*.up": 2, "*.down": 4}
    assert split_features(module, plan(ColumnLinear(pattern="*.up", segments=(4, 8)))) == {"*.up": 4}


class Table(nn.Module):
    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        return torch.arange(length * 6.0).view(1, length, 6), -torch.arange(length * 6.0).view(1, length, 6)


def test_tables_of_all_heads_are_split_where_their_features_are() -> None:
    rules = ShardPlan(
        streams=("x",), blocks=("0",), shards=(), gathers=(), linears=(), tables=(FeatureTable(pattern="1", dim=2),)
    )
    whole = nn.Sequential(Block(), Table())
    parts = [split_weights(whole, rules, axis(index))[1](4) for index in range(3)]  # type: ignore[index]
    for number, expected in enumerate(whole[1](4)):
        assert torch.equal(torch.cat([part[number] for part in parts], dim=2), expected)


def test_twin_shares_tensors_and_keeps_hooks() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    module[0].register_forward_hook(lambda _module, _args, output: output + 1)
    copied = weight_sharing_copy(module).eval()
    assert copied[0] is not module[0]
    assert copied[0].running_mean is module[0].running_mean
    assert copied(torch.zeros(1, 3)).mean() == 1
