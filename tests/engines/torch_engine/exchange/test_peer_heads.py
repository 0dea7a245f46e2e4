"""A step that copies between ranks holds little memory, with plain tensors for shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engines.parallel.collectives import Axis
from engines.parallel.local_attention import plain_attention
from engines.torch_engine.exchange import peer_heads as peer_exchange
from engines.torch_engine.exchange.heads import without_lse
from engines.torch_engine.exchange.peer_heads import PeerHeads
from engines.torch_engine.exchange.peer_memory import addresses_of
from tests.engines.support.rank_resources import separate_rank_resources

CPU = torch.device("cpu")
AXIS = Axis(ranks=(0, 1), index=0)


class OwnMemory:
    """Stands for ``PeerMemory``, without another rank."""

    @staticmethod
    def open(numel: int, sample: Tensor, axis: Axis, *, use: str) -> Any:
        views = tuple(sample.new_empty(numel) for _ in axis.ranks)
        return SimpleNamespace(local=views[axis.index], views_W=views, addresses_W=addresses_of(views))


def test_shapes_share_what_is_copied_from() -> None:
    """Each shape has its own step, which is never dropped."""
    with patch.object(peer_exchange, "PeerMemory", OwnMemory), separate_rank_resources() as resources:
        for rows in (100, 40, *range(2, 200, 2)):
            heads = PeerHeads(without_lse(plain_attention), AXIS, CPU)
            memory = heads._memory(torch.empty(rows, 3, 4, 8))
            assert memory.staging_WN.shape == (2, rows * 3 * 4 * 8 // 2)
        (staged,) = resources.get(peer_exchange.StagingMemory).values()
        assert sum(tensor.numel() for tensor in staged) < 4 * rows * 3 * 4 * 8
