"""The comparison of ways to read weights runs on CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.weight_reading import measure
from engines.core.engine import RankContext
from engines.parallel import file_reading
from engines.parallel.collectives import Axis, all_gather
from engines.parallel.early_start import host_axis
from engines.parallel.mesh import ALONE
from tests.engines.support.gloo import gang


def swapped(x: Tensor, axis: Axis) -> Tensor:
    """Return the shares in the wrong order."""
    return all_gather(x, axis).flip(0)


def measured(file: Path, is_wrong: bool) -> dict[str, Any]:
    context = RankContext(rank=dist.get_rank(), num_ranks=2, device="cpu")
    axes = {"each": ALONE, "together": host_axis(context)}
    with patch.object(file_reading, "all_gather", swapped if is_wrong else all_gather):
        return measure((file,), torch.device("cpu"), axes, 1)


@pytest.mark.slow  # the ranks import torch and more, which no other test of this folder needs
@pytest.mark.parametrize("is_wrong", [False, True])
def test_both_ways_are_timed_and_compared(tmp_path: Path, is_wrong: bool) -> None:
    save_file({"one": torch.randn(100, 7), "other": torch.arange(9)}, tmp_path / "some.safetensors")
    for document in gang(2).run(measured, tmp_path / "some.safetensors", is_wrong):
        assert document["same_bits"] is not is_wrong
        assert document["num_bytes"] == 100 * 7 * 4 + 9 * 8
        assert [len(rounds) for rounds in document["rounds"].values()] == [2, 2]
        assert document["ways"]["each"]["exchange_s"] == 0 < document["ways"]["together"]["exchange_s"]
