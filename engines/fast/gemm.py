"""GEMMs of one or several linear layers, in the precision of the weights or in float8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import Precision, WriteWeight
from engines.core.torch_private import addmm_activation, scaled_mm
from engines.fast.kernels import QuantRows, Rows, gated, quantize_rows, quantize_weight
from engines.quantization.linear import FP8

Activation = Literal["gelu", "swiglu"]
"""Tanh-form GELU, or SwiGLU, whose GEMM computes the gates first, then the gated values."""

ALL = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """Some rows and columns of a layer's weight."""

    parameter: nn.Parameter
    rows: slice = field(default_factory=lambda: ALL)
    columns: slice = field(default_factory=lambda: ALL)

    def of(self, weight_NK: Tensor) -> Tensor:
        return weight_NK[self.rows, self.columns]


class Gemm(Protocol):
    """``x @ weight.T + bias`` on rows."""

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Return the result, written to ``out`` if given (contiguous rows)."""
        ...

    def activated(self, x: Rows) -> Rows:
        """Return the activated result in the form that the next GEMM reads."""
        ...

    def without_bias(self) -> tuple[Gemm, Tensor | None]:
        """Return the GEMM alone and the bias to add elsewhere. None: this GEMM adds its bias at no cost."""
        ...

    def add(self, update_RN: Tensor, x: Rows) -> tuple[Tensor, ...]:
        """Return one or two tensors whose sum is ``update + x @ weight.T + bias``; ``update`` may be overwritten."""
        ...


class NativeGemm:
    """A cuBLAS GEMM with bias and GELU in its epilogue; it reads the layer's own weight."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, activation: Activation = "gelu") -> None:
        self.weight_NK, self.bias_N, self._activation = weight_NK, bias_N, activation

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if self.bias_N is None:
            return torch.mm(x, self.weight_NK.t(), out=out)
        return torch.addmm(self.bias_N, x, self.weight_NK.t(), out=out)

    def activated(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        if self._activation == "swiglu":
            return gated(self(x))
        assert self.bias_N is not None
        if x.is_cuda:  # the epilogue's GELU is the tanh form; on the CPU the same op uses the exact one
            fused: Tensor = addmm_activation(self.bias_N, x, self.weight_NK.t(), use_gelu=True)
            return fused
        return functional.gelu(functional.linear(x, self.weight_NK, self.bias_N), approximate="tanh")

    def without_bias(self) -> tuple[Gemm, Tensor | None]:
        return NativeGemm(self.weight_NK, None), self.bias_N

    def add(self, update_RN: Tensor, x: Rows) -> tuple[Tensor, ...]:
        assert isinstance(x, Tensor)
        assert self.bias_N is None, "the bias belongs to the GEMM that is added to"
        return (update_RN.addmm_(x, self.weight_NK.t()),)


class Float8Gemm:
    """Row-wise float8: a fixed scale per output feature, and a dynamic scale per row of activations.

    ``parts`` are the stacked parts of ``weight_NK``.
    """

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        activation: Activation = "gelu",
        parts: Sequence[WeightPart] = (),
    ) -> None:
        self._activation, self._parts, self.bias_N = activation, tuple(parts), bias_N
        self.weight_NK = torch.empty_like(weight_NK, dtype=FP8, memory_format=torch.contiguous_format)
        self.scale_1N = torch.empty(1, len(weight_NK), dtype=torch.float32, device=weight_NK.device)
        quantize_weight(weight_NK, weight_NK.dtype, self._rows(ALL))

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        rows = x if isinstance(x, QuantRows) else quantize_rows(x)
        if not rows.values_RC.is_cuda:
            return self._emulated(rows, out)
        return scaled_mm(
            rows.values_RC, self.weight_NK.t(), scale_a=rows.scale_R1, scale_b=self.scale_1N, bias=self.bias_N,
            out_dtype=torch.bfloat16, use_fast_accum=True, out=out,
        )  # fmt: skip

    def activated(self, x: Rows) -> QuantRows:
        """Return the quantised rows; GELU shares the quantisation pass."""
        if self._activation == "swiglu":
            return quantize_rows(gated(self(x)))
        return quantize_rows(self(x), gelu=True)

    def without_bias(self) -> tuple[Gemm, Tensor | None]:
        return self, None

    def add(self, update_RN: Tensor, x: Rows) -> tuple[Tensor, ...]:
        return update_RN, self(x)

    def writers(self) -> Iterator[tuple[nn.Parameter, WriteWeight]]:
        """Yield the parameter of each part with the function that writes its new value."""
        start = 0
        for part in self._parts:
            stop = start + part.of(part.parameter).shape[0]
            yield part.parameter, partial(self._write, slice(start, stop), part)
            start = stop

    def _write(self, rows: slice, part: WeightPart, weight_NK: Tensor) -> None:
        """Write in place, so that captured steps see the new value."""
        quantize_weight(part.of(weight_NK), part.parameter.dtype, self._rows(rows))

    def _rows(self, rows: slice) -> QuantRows:
        return QuantRows(values_RC=self.weight_NK[rows], scale_R1=self.scale_1N[:, rows].t())

    def _emulated(self, rows: QuantRows, out: Tensor | None) -> Tensor:
        weight_NK = self.weight_NK.float() * self.scale_1N.t()
        result = functional.linear(rows.dequantized(), weight_NK)
        result = (result if self.bias_N is None else result + self.bias_N.float()).to(_result_dtype(self.bias_N))
        return result if out is None else out.copy_(result)


def make_gemm(
    weight_NK: Tensor,
    bias_N: Tensor | None,
    precision: Precision,
    activation: Activation = "gelu",
    *,
    parts: Sequence[WeightPart] = (),
) -> Gemm:
    """Return a GEMM in ``precision``. ``parts`` of the stacked ``weight_NK`` are for weights that change later."""
    if precision == "native":
        return NativeGemm(weight_NK, bias_N, activation)
    return Float8Gemm(weight_NK, bias_N, activation, parts)


def stack(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the stacked weight and bias of all ``linears``; their parameters become views of them.

    The bias is None if no layer has one.
    """
    weight_NK = torch.cat([linear.weight.detach() for linear in linears])
    has_bias = any(linear.bias is not None for linear in linears)
    bias_N = torch.cat([_bias(linear) for linear in linears]) if has_bias else None
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight_NK[start:stop]
        if linear.bias is not None and bias_N is not None:
            linear.bias.data = bias_N[start:stop]
        start = stop
    return weight_NK, bias_N


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()


def _result_dtype(bias_N: Tensor | None) -> torch.dtype:
    return torch.bfloat16 if bias_N is None else bias_N.dtype
