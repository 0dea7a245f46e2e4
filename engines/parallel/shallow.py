"""A model cut down to its first blocks: small enough to be held whole beside a rank's share of all of it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from engines.core.model import DenoiserModel
from engines.parallel.copies import twin


def shallow(model: DenoiserModel, num_blocks: int) -> DenoiserModel:
    """``model`` with the first ``num_blocks`` of each list of blocks; it shares whatever tensors it keeps."""
    return replace(model, modules={name: _cut(module, model, num_blocks) for name, module in model.modules.items()})


def _cut(module: nn.Module, model: DenoiserModel, num_blocks: int) -> nn.Module:
    mine = twin(module)
    for name in model.plan.blocks:
        mine.set_submodule(name, nn.ModuleList(list(mine.get_submodule(name).children())[:num_blocks]))
    return mine
