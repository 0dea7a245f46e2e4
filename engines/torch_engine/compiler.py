"""Per-block compilation: one compiled function serves all blocks of a kind, so a deep model compiles in seconds."""

from __future__ import annotations

import types

import torch
from torch import nn

from engines.parallel.shard_plan import ShardPlan

MAX_VARIANTS = 256
"""Compiled versions of one block: one per team and shape. PyTorch's own limit of 8 is meant for accidents."""


def compile_blocks(module: nn.Module, plan: ShardPlan, *, backend: str = "inductor") -> None:
    """Compile the ``forward`` of every repeated block, in place.

    The method is compiled and not the module, so hooks (which cut and gather tokens) stay outside the traced code. It
    is taken from the class: a copied module carries its original's compiled method, which is bound to the original.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for block in _blocks(module, plan):
        forward = types.MethodType(type(block).forward, block)
        block.__dict__["forward"] = torch.compile(forward, dynamic=False, fullgraph=True, backend=backend)


def release_blocks(module: nn.Module, plan: ShardPlan) -> None:
    """Undo ``compile_blocks``."""
    for block in _blocks(module, plan):
        block.__dict__.pop("forward", None)


def _blocks(module: nn.Module, plan: ShardPlan) -> list[nn.Module]:
    return [block for name in plan.blocks for block in module.get_submodule(name).children()]
