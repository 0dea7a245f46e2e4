"""Copies of modules and models that may be changed without changing the original, at no cost in memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

from torch import nn

from engines.core.model import DenoiserModel

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def weight_sharing_copy(module: AnyModule) -> AnyModule:
    """A copy of the tree of submodules, hooks included; parameters and buffers are the same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def meta_copy(module: AnyModule) -> AnyModule:
    """A copy whose parameters and buffers are on the meta device, without hooks."""
    memo: dict[int, object] = {id(x): nn.Parameter(x.to("meta"), requires_grad=False) for x in module.parameters()}
    memo |= {id(x): x.to("meta") for x in module.buffers()}
    copied = copy.deepcopy(module, memo)
    for each in copied.modules():  # hooks of an engine that runs the original
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()
    return copied


def truncated(model: DenoiserModel, num_blocks: int) -> DenoiserModel:
    """``model`` with the first ``num_blocks`` of each list of blocks; it shares whatever tensors it keeps.

    Small enough to be held whole beside a rank's share of all of it.
    """
    return replace(model, modules={name: _cut(module, model, num_blocks) for name, module in model.modules.items()})


def _cut(module: nn.Module, model: DenoiserModel, num_blocks: int) -> nn.Module:
    copied = weight_sharing_copy(module)
    for name in model.plan.blocks:
        copied.set_submodule(name, nn.ModuleList(list(copied.get_submodule(name).children())[:num_blocks]))
    return copied
