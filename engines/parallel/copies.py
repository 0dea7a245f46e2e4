"""Copies of a module that may be changed without changing the original, at no cost in memory."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def twin(module: AnyModule) -> AnyModule:
    """A copy of the tree of submodules, hooks included; parameters and buffers are the same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
