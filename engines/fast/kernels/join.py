"""Rows and columns put together as the next matrix product wants them."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.fast_model import Precision
from engines.fast.kernels.quantize import quantize_rows
from engines.fast.kernels.rows import QuantRows, Rows


def join_columns(x_GRC: Tensor) -> Tensor:
    """Returns ``x_RC``, groups of columns side by side; no copy if there is one group."""
    columns = x_GRC.unbind(0)
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def collected_rows(x_GRC: Tensor, precision: Precision) -> Rows:
    """Returns what an exchange brought back, quantised where products are."""
    return join_columns(x_GRC) if precision == "native" else quantize_rows(x_GRC)


def join_rows(first: Rows, second: Rows) -> Rows:
    """Returns both, one under the other."""
    if isinstance(first, QuantRows):
        assert isinstance(second, QuantRows)
        pairs = ((first.values_RC, second.values_RC), (first.scale_R1, second.scale_R1))
        values_RC, scale_R1 = (torch.cat(pair) for pair in pairs)
        return QuantRows(values_RC=values_RC, scale_R1=scale_R1)
    assert isinstance(second, Tensor)
    return torch.cat((first, second))
