"""What a family gives for its fast path: the same step as its module, cut where an engine can gain time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from engines.core.model import ModelInputs
from engines.fast.gemm import Float8Product, NativeProduct, Product
from engines.fast.kernels import QuantRows, Rows, quantize_rows
from engines.fast.side_streams import Lane
from engines.torch_engine.exchange.heads import HeadExchange, join_columns

Precision = Literal["native", "fp8"]
StepTensors = Mapping[str, Tensor]
"""Everything that one step reads, by name. A captured step keeps buffers of these shapes."""


class FastModel(Protocol):
    """One transformer's step, for one team's exchange."""

    def ahead(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """What no step of a job changes, from the team's share of the inputs: embedded text, rotary tables."""
        ...

    def step(self, latents: Tensor, ahead: StepTensors) -> Tensor:
        """My tokens of the prediction from my tokens of the latents."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What an engine gives a fast model: the team's exchange, and lanes for the second stream and for the MLP.

    ``streams_apart``: streams meet in attention only.
    """

    exchange: HeadExchange
    stream_lane: Lane
    mlp_lane: Lane
    streams_apart: bool = False


class FastWeights(Protocol):
    """A transformer's weights arranged for the fast path, once per module; teams share them."""

    def model(self, parts: StepParts) -> FastModel: ...

    def scheduled(self, inputs: ModelInputs, timesteps_SB: Tensor) -> dict[str, Tensor]:
        """What depends on the timestep but not on the latents (modulation), for S steps at once: stacked, step first.

        ``inputs`` are whole; their own timestep is not read. ``timesteps_SB`` may have one column for all entries.
        """
        ...


ArrangeWeights = Callable[[nn.Module, Precision], FastWeights]


def make_product(weight_NK: Tensor, bias_N: Tensor | None, precision: Precision) -> Product:
    return NativeProduct(weight_NK, bias_N) if precision == "native" else Float8Product(weight_NK, bias_N)


def collected_rows(groups: tuple[Tensor, ...], precision: Precision) -> Rows:
    """What an exchange brought back, as the next product wants it."""
    if precision == "native":
        return join_columns(groups)
    return quantize_rows(groups[0] if len(groups) == 1 else join_columns(groups))


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
