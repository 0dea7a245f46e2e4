"""Each call gets the right memory; ``peer_check`` tests on GPUs that ranks reach each other's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from engines.core.engine import JobFailedError
from engines.parallel.collectives import Axis
from engines.parallel.division import forward_fails_alone
from engines.torch_engine.exchange.peer_memory import PeerMemory, addresses_of
from tests.engines.support.rank_resources import separate_rank_resources

PAIR, OTHER_PAIR = (Axis(ranks=ranks, index=0) for ranks in ((0, 1), (2, 3)))
SHARED = PeerMemory._new
"""The real function, which ``fresh`` replaces."""
SAMPLE = torch.zeros(())


def two_tensors(numel: int, sample: Tensor, axis: Axis) -> PeerMemory:
    views = tuple(sample.new_zeros(numel) for _ in axis.ranks)
    return PeerMemory(local=views[axis.index], views_W=views, addresses_W=addresses_of(views), handle=None)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with separate_rank_resources(), patch.object(PeerMemory, "_new", two_tensors):
        yield


def test_sizes_share_the_smallest_memory_that_holds_them() -> None:
    opened = [PeerMemory.open(numel, SAMPLE, PAIR, use="queries") for numel in (10, 100, 16, 60, 128)]
    assert [memory.local.numel() for memory in opened] == [10, 100, 16, 60, 128]
    assert all(view.numel() == memory.local.numel() for memory in opened for view in memory.views_W)
    small, large, *others = (memory.local.data_ptr() for memory in opened)
    assert small != large
    assert others == [small, large, large]
    assert [memory.addresses_W[0].item() for memory in opened] == [small, large, small, large, large]


def test_other_uses_ranks_and_dtypes_have_their_own() -> None:
    half = SAMPLE.to(torch.bfloat16)
    opened = [
        PeerMemory.open(8, SAMPLE, PAIR, use="queries"),
        PeerMemory.open(8, SAMPLE, PAIR, use="results"),
        PeerMemory.open(8, SAMPLE, OTHER_PAIR, use="queries"),
        PeerMemory.open(8, half, PAIR, use="queries"),
    ]
    assert len({memory.local.data_ptr() for memory in opened}) == 4
    assert opened[3].local.dtype == torch.bfloat16


def test_what_fails_after_a_barrier_is_no_matter_of_one_job() -> None:
    """Other ranks may wait for this one."""
    memory = replace(PeerMemory.open(8, SAMPLE, PAIR, use="queries"), handle=Mock())

    @forward_fails_alone()
    def forward(num_barriers: int) -> None:
        for _ in range(num_barriers):
            memory.barrier(channel=0)
        raise RuntimeError("too wide")

    with pytest.raises(JobFailedError, match="too wide"):
        forward(0)
    with pytest.raises(RuntimeError, match=r"^too wide$"):
        forward(1)


def test_a_rank_without_memory_to_share_is_no_matter_of_one_job() -> None:
    """The others wait in the rendezvous for this one."""
    no_memory = Mock(empty=Mock(side_effect=RuntimeError("CUDA driver error: out of memory")))
    with (
        patch("engines.torch_engine.exchange.peer_memory.symmetric_memory", lambda: no_memory),
        patch.object(PeerMemory, "_new", SHARED),
        pytest.raises(RuntimeError, match=r"^CUDA driver error"),
        forward_fails_alone(),
    ):
        PeerMemory.open(8, SAMPLE, PAIR, use="queries")
