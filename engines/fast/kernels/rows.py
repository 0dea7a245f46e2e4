"""Rows of activations: plain, or quantised with one scale a row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engines.quantization.scales import FP8, row_scales


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantRows:
    """``values_RC`` (float8 e4m3) times ``scale_R1`` (float32) are the rows."""

    values_RC: Tensor
    scale_R1: Tensor

    def dequantized(self) -> Tensor:
        """Returns the rows, float32."""
        return self.values_RC.float() * self.scale_R1

    def __getitem__(self, rows: slice) -> QuantRows:
        return QuantRows(values_RC=self.values_RC[rows], scale_R1=self.scale_R1[rows])


Rows = Tensor | QuantRows


def quantized(x_RC: Tensor) -> QuantRows:
    """Returns ``x_RC`` with the largest magnitude of each row mapped to the largest float8; plain PyTorch."""
    scale_R1 = row_scales(x_RC, "fp8")
    return QuantRows(values_RC=(x_RC.float() / scale_R1).to(FP8), scale_R1=scale_R1)
