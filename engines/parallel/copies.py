"""Copies of modules and models that share memory with the original and can be changed independently."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from engines.core.model import DenoiserModel
from engines.core.shard_plan import ShardPlan
from engines.core.torch_private import clear_forward_hooks

WEIGHTLESS = "is_weightless"
"""Attribute that marks a copy without weights."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def weight_sharing_copy(module: AnyModule) -> AnyModule:
    """Return a copy of the module tree, hooks included, whose parameters and buffers are the same tensors."""
    return _tensor_sharing_copy(module, {})


def _tensor_sharing_copy(module: AnyModule, instead: Mapping[int, object]) -> AnyModule:
    """Return a copy of the module tree with the same tensors, in which ``instead`` replaces objects, by their ids."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {**{id(tensor): tensor for tensor in tensors}, **instead})


def weightless_copy(module: AnyModule) -> AnyModule:
    """Return a copy on the CPU, without hooks, whose parameters take no memory: each is one zero, expanded.

    Linear layers return zeros at once. Buffers and values computed from inputs are true, so forwards that read values
    (masks, positions) run. Buffers on "meta" become zeros.
    """
    plain = [x for each in module.modules() for x in vars(each).values() if isinstance(x, Tensor)]
    memo: dict[int, object] = {id(x): on_cpu(x) for x in (*module.buffers(), *plain)}
    memo |= {id(x): nn.Parameter(_expanded_zero(x), requires_grad=False) for x in module.parameters()}
    result = copy.deepcopy(module, memo)
    for each in result.modules():
        clear_forward_hooks(each)  # they belong to an engine that runs the original
        if isinstance(each, nn.Linear):
            each.__dict__["forward"] = partial(_zero_output, each)
    result.__dict__[WEIGHTLESS] = True
    return result


def is_weightless(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``weightless_copy``, made for counting: work done once per job may be skipped."""
    return WEIGHTLESS in module.__dict__


def on_cpu(x: Tensor) -> Tensor:
    """Return a copy of ``x`` on the CPU; zeros if it is on "meta"."""
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.to("cpu", copy=True)


def _expanded_zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


def _zero_output(layer: nn.Linear, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], layer.out_features)


def truncated(model: DenoiserModel, num_blocks: int) -> DenoiserModel:
    """Return ``model`` with the first ``num_blocks`` of each list of blocks, sharing their tensors.

    The result is small enough to be held whole beside a rank's share of the full model.
    """
    modules = {name: first_blocks(module, model.plan.blocks, num_blocks) for name, module in model.modules.items()}
    return replace(model, modules=modules, plan=_truncate_plan(model, num_blocks))


def _truncate_plan(model: DenoiserModel, num_blocks: int) -> ShardPlan:
    """Return the plan for the first ``num_blocks``, with rules for a list's last block moved to the new last block."""
    module = next(iter(model.modules.values()))
    lengths = {name: len(list(module.get_submodule(name).children())) for name in model.plan.blocks}
    last = {f"{name}.{length - 1}": f"{name}.{min(length, num_blocks) - 1}" for name, length in lengths.items()}
    gathers = tuple(replace(gather, module=last.get(gather.module, gather.module)) for gather in model.plan.gathers)
    return replace(model.plan, gathers=gathers)


def first_blocks(module: AnyModule, lists: Iterable[str], num_blocks: int) -> AnyModule:
    """Return a copy with the first ``num_blocks`` of each of these lists of blocks, sharing its tensors."""
    blocks = {name: list(module.get_submodule(name).children()) for name in lists}
    left_out = [block for each in blocks.values() for block in each[num_blocks:]]
    result = _tensor_sharing_copy(module, {id(block): nn.Identity() for block in left_out})
    for name in blocks:
        result.set_submodule(name, nn.ModuleList(list(result.get_submodule(name).children())[:num_blocks]))
    return result
