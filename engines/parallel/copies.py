"""Copies of modules and models that may be changed without changing the original, at no cost in memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from engines.core.model import DenoiserModel
from engines.core.shard_plan import ShardPlan
from engines.core.torch_private import clear_forward_hooks

WEIGHTLESS = "is_weightless"
"""The mark of a copy without weights."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def weight_sharing_copy(module: AnyModule) -> AnyModule:
    """A copy of the tree of submodules, hooks included; parameters and buffers are the same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def weightless_copy(module: AnyModule) -> AnyModule:
    """A copy on the CPU, without hooks, whose parameters take no memory: each is one zero, repeated.

    Linear layers give zeros at once. Tables, and what is computed of inputs alone, have true values: forwards that ask
    for values (masks, positions) run. Tables on "meta" have none, and become zeros.
    """
    plain = [x for each in module.modules() for x in vars(each).values() if isinstance(x, Tensor)]
    memo: dict[int, object] = {id(x): on_cpu(x) for x in (*module.buffers(), *plain)}
    memo |= {id(x): nn.Parameter(_repeated_zero(x), requires_grad=False) for x in module.parameters()}
    copied = copy.deepcopy(module, memo)
    for each in copied.modules():
        clear_forward_hooks(each)  # of an engine that runs the original
        if isinstance(each, nn.Linear):
            each.__dict__["forward"] = partial(_zeros_of, each)
    copied.__dict__[WEIGHTLESS] = True
    return copied


def is_weightless(module: nn.Module) -> bool:
    """Whether it is such a copy, which is there to be counted: what comes once a job may be left out."""
    return WEIGHTLESS in module.__dict__


def on_cpu(x: Tensor) -> Tensor:
    """A copy of ``x`` there; zeros if it has no values."""
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.to("cpu", copy=True)


def _repeated_zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


def _zeros_of(layer: nn.Linear, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], layer.out_features)


def truncated(model: DenoiserModel, num_blocks: int) -> DenoiserModel:
    """``model`` with the first ``num_blocks`` of each list of blocks; it shares whatever tensors it keeps.

    Small enough to be held whole beside a rank's share of all of it.
    """
    modules = {name: _cut(module, model, num_blocks) for name, module in model.modules.items()}
    return replace(model, modules=modules, plan=_renamed_last(model, num_blocks))


def _renamed_last(model: DenoiserModel, num_blocks: int) -> ShardPlan:
    """The plan for the first ``num_blocks``: what it says of a list's last block is then said of another."""
    some = next(iter(model.modules.values()))
    lengths = {name: len(list(some.get_submodule(name).children())) for name in model.plan.blocks}
    last = {f"{name}.{length - 1}": f"{name}.{min(length, num_blocks) - 1}" for name, length in lengths.items()}
    gathers = tuple(replace(gather, module=last.get(gather.module, gather.module)) for gather in model.plan.gathers)
    return replace(model.plan, gathers=gathers)


def _cut(module: nn.Module, model: DenoiserModel, num_blocks: int) -> nn.Module:
    copied = weight_sharing_copy(module)
    for name in model.plan.blocks:
        copied.set_submodule(name, nn.ModuleList(list(copied.get_submodule(name).children())[:num_blocks]))
    return copied
