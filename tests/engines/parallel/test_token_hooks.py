"""Tensors that go to several blocks are cut once a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engines.core.layout import TokenLayout
from engines.core.shard_plan import ShardPlan, TokenShard
from engines.parallel.collectives import Axis
from engines.parallel.token_hooks import TokenHooks

SHARD = TokenShard(module="*", where="input", key="x_LC", dim=0, stream="clip")
PLAN = ShardPlan(streams=("clip",), blocks=("0",), shards=(SHARD,), gathers=(), linears=())
SECOND = Axis(ranks=(0, 1), index=1)


class Block(nn.Module):
    def forward(self, x_LC: Tensor) -> Tensor:
        return x_LC


def test_blocks_share_the_cut_of_a_tensor_until_it_changes() -> None:
    """Three tokens over two ranks: the second has one, and padding. Even cuts have memory of their own, too."""
    blocks = nn.ModuleList([Block(), Block()])
    hooks, x_LC = TokenHooks(blocks, PLAN), torch.arange(6.0).view(3, 2)
    with hooks.over(TokenLayout(lengths=(("clip", 3),), num_chunks=2), SECOND):
        first, second = (block(x_LC) for block in blocks)
        x_LC += 1
        changed = blocks[1](x_LC)
    assert second is first
    assert first.tolist() == [[4, 5], [0, 0]]
    assert changed.tolist() == [[5, 6], [0, 0]]
    with hooks.over(TokenLayout(lengths=(("clip", 2),), num_chunks=2), SECOND):
        even = blocks[0](x_LC[:2])
    assert even.tolist() == [[3, 4]]
    assert even.storage_offset() == 0
