"""What an engine gives a hand-ordered step, and the small steps that its blocks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.core.fast_model import Precision
from engines.fast.gemm import Float8Product, NativeProduct, Product
from engines.fast.kernels import QuantRows, Rows, quantize_rows
from engines.fast.side_streams import Lane
from engines.torch_engine.exchange.heads import HeadExchange, join_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What an engine gives a fast model: the team's exchange, and lanes for the second stream and for the MLP."""

    exchange: HeadExchange
    stream_lane: Lane
    mlp_lane: Lane


def make_product(weight_NK: Tensor, bias_N: Tensor | None, precision: Precision) -> Product:
    return NativeProduct(weight_NK, bias_N) if precision == "native" else Float8Product(weight_NK, bias_N)


def collected_rows(x_GRC: Tensor, precision: Precision) -> Rows:
    """What an exchange brought back, as the next product wants it."""
    if precision == "native":
        return join_columns(x_GRC)
    return quantize_rows(x_GRC)


def joined_rows(first: Rows, second: Rows) -> Rows:
    """One under the other."""
    if isinstance(first, QuantRows):
        assert isinstance(second, QuantRows)
        pairs = ((first.values_RC, second.values_RC), (first.scale_R1, second.scale_R1))
        values_RC, scale_R1 = (torch.cat(pair) for pair in pairs)
        return QuantRows(values_RC=values_RC, scale_R1=scale_R1)
    assert isinstance(second, Tensor)
    return torch.cat((first, second))


def run_of_rows(x: Rows, start: int, stop: int | None) -> Rows:
    rows: Tensor | QuantRows = x[start:stop]
    return rows
