"""Per-block compilation: one compiled function serves all blocks of a kind, so a deep model compiles in seconds."""

from __future__ import annotations

import torch
from torch import nn

from engines.parallel.shard_plan import ShardPlan


def compile_blocks(module: nn.Module, plan: ShardPlan) -> None:
    """Compile the ``forward`` of every repeated block, in place.

    The method is compiled and not the module, so hooks (which cut and gather tokens) stay outside the traced code.
    """
    for name in plan.blocks:
        for block in module.get_submodule(name).children():
            block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
