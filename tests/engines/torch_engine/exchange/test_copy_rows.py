"""Rows are copied, and streams lead to other ranks; ``test_gpu`` tests the copy engines."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from engines.torch_engine.exchange.peer_memory import copy_rows, copy_streams
from tests.engines.torch_engine.support.teams import WORLD, axis_of
from tests.engines.torch_engine.support.thread_memory import CPU


def test_rows_at_any_distance() -> None:
    """The rows are columns of two wider tensors, whose other columns stay."""
    source_RC, target_RC = torch.arange(24.0).view(4, 6), torch.zeros(4, 5)
    copy_rows(target_RC[:, 1:3], source_RC[:, 3:5])
    expected_RC = torch.zeros(4, 5)
    expected_RC[:, 1:3] = source_RC[:, 3:5]
    assert torch.equal(target_RC, expected_RC)


def on_gpu(rows_RC: torch.Tensor) -> Mock:
    """Return a tensor that claims to be on a GPU."""
    facts = {"shape": rows_RC.shape, "dtype": rows_RC.dtype, "device": torch.device("cuda"), "copy_": Mock()}
    return Mock(wraps=rows_RC, **facts)


def test_rows_without_gaps_go_as_a_whole() -> None:
    """A GPU copies rows within itself one by one, and slowly."""
    source_RC, target_RC = on_gpu(torch.zeros(4, 6)[1:3]), on_gpu(torch.zeros(5, 6)[3:])
    copy_rows(target_RC, source_RC)
    target_RC.copy_.assert_called_once_with(source_RC)


@pytest.mark.parametrize(
    "source_RC",
    [torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.float64), torch.zeros(2, 4).T],
    ids=["other columns", "other dtype", "columns apart"],
)
def test_what_is_no_row_is_our_mistake(source_RC: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        copy_rows(torch.zeros(4, 2), source_RC)


def test_no_rank_is_written_to_by_all_at_once() -> None:
    """In each turn all ranks have different targets; a rank itself comes last if ``to_self``."""
    targets = [list(copy_streams(axis_of(rank), CPU, to_self=True)) for rank in range(WORLD)]
    for turn in zip(*targets, strict=True):
        assert sorted(turn) == list(range(WORLD))
    assert [each[-1] for each in targets] == list(range(WORLD))
    assert [list(copy_streams(axis_of(rank), CPU, to_self=False)) for rank in range(WORLD)] == [
        each[:-1] for each in targets
    ]
