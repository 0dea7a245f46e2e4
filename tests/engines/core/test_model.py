"""A model computes in the dtype of most of its weights."""

from __future__ import annotations

import torch
from torch import nn

from engines.core.model import dtype_of


def test_a_small_table_in_float32_does_not_decide() -> None:
    module = nn.ModuleDict({"table": nn.LayerNorm(8), "linear": nn.Linear(8, 64).bfloat16()})
    assert next(module.parameters()).dtype == torch.float32
    assert dtype_of(module) == torch.bfloat16
