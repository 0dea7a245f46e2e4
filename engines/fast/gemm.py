"""GEMMs of one or several linear layers, in the precision of the weights or in float8."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import Precision, WriteWeight
from engines.core.torch_private import addmm_activation, scaled_mm
from engines.fast.kernels import QuantRows, Rows, RowsWriter, gated, quantize_rows, quantize_weight
from engines.quantization.linear import FP8, compute_device

Activation = Literal["gelu", "swiglu"]
"""Tanh-form GELU, or SwiGLU, whose GEMM computes the gates first, then the gated values."""

ALL = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightPart:
    """Some rows and columns of a layer's weight."""

    parameter: nn.Parameter
    """The whole weight, (outputs, inputs)."""
    rows: slice = field(default_factory=lambda: ALL)
    """Outputs."""
    columns: slice = field(default_factory=lambda: ALL)
    """Inputs."""

    def of(self, weight_NK: Tensor) -> Tensor:
        return weight_NK if self.rows == ALL == self.columns else weight_NK[self.rows, self.columns]


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


def gelu_addmm(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return the tanh-form GELU of ``x @ weight.T + bias``, on CUDA within one kernel."""
    if x_MK.is_cuda:  # the epilogue's GELU is the tanh form; on the CPU the same op uses the exact one
        fused: Tensor = addmm_activation(bias_N, x_MK, weight_NK.t(), use_gelu=True)
        return fused
    return functional.gelu(functional.linear(x_MK, weight_NK, bias_N), approximate="tanh")


@torch.library.custom_op("troupe::gelu_product", mutates_args=())
def gelu_product(x: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return ``gelu_addmm`` of ``x`` (..., K) as one operator of compiled code."""
    return torch.unflatten(gelu_addmm(x.flatten(0, -2), weight_NK, bias_N), 0, x.shape[:-1])


@gelu_product.register_fake
def _(x: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_NK.shape[0])


GELU_PRODUCT: Any = torch.ops.troupe.gelu_product.default
"""``gelu_product`` as a node of a graph."""


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
        return gelu_addmm(x, self.weight_NK, self.bias_N)

    def without_bias(self) -> tuple[Gemm, Tensor | None]:
        return NativeGemm(self.weight_NK, None), self.bias_N

    def add(self, update_RN: Tensor, x: Rows) -> tuple[Tensor, ...]:
        assert isinstance(x, Tensor)
        assert self.bias_N is None, "the bias belongs to the GEMM that is added to"
        return (update_RN.addmm_(x, self.weight_NK.t()),)


class Float8Gemm:
    """Row-wise float8: a fixed scale per output feature, and a dynamic scale per row of activations.

    Its weight consists of ``parts``, stacked. They are read one after another, from the host to torch's default device.
    """

    def __init__(self, parts: Sequence[WeightPart], bias_N: Tensor | None, activation: Activation = "gelu") -> None:
        self._activation, self.bias_N = activation, bias_N
        weights = [part.of(part.parameter.detach()) for part in parts]
        ends = list(itertools.accumulate(len(own_NK) for own_NK in weights))
        device = compute_device(weights[0])
        self.weight_NK = torch.empty(ends[-1], weights[0].shape[1], dtype=FP8, device=device)
        self.scale_1N = torch.empty(1, ends[-1], dtype=torch.float32, device=device)
        self._parts = dict[WeightPart, QuantRows]()
        for part, own_NK, end in zip(parts, weights, ends, strict=True):
            own = slice(end - len(own_NK), end)
            self._parts[part] = rows = QuantRows(values_RC=self.weight_NK[own], scale_R1=self.scale_1N[:, own].t())
            quantize_weight(own_NK.to(device), own_NK.dtype, rows)

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
        for part, rows in self._parts.items():
            yield part.parameter, RowsWriter(part_of=part.of, dtype=part.parameter.dtype, into=rows)

    def release(self, unless: Collection[nn.Parameter]) -> Iterator[QuantisedPart]:
        """Forget the parameters of all parts, ``unless`` they change later; yield what stands for them."""
        released = [part for part in self._parts if not any(part.parameter is one for one in unless)]
        for part in released:
            yield QuantisedPart(part=part, values=self._parts.pop(part))

    def _emulated(self, rows: QuantRows, out: Tensor | None) -> Tensor:
        weight_NK = self.weight_NK.float() * self.scale_1N.t()
        result = functional.linear(rows.dequantized(), weight_NK)
        if self.bias_N is not None:
            result = result + self.bias_N.float()
        result = result.to(torch.bfloat16 if self.bias_N is None else self.bias_N.dtype)
        return result if out is None else out.copy_(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisedPart:
    """Rows of a float8 GEMM that stand for ``part`` of a layer."""

    part: WeightPart
    """Part of the weights that they stand for."""
    values: QuantRows
    """The rows in float8, with a scale each."""


class DequantisedLinear(nn.Module):
    """A linear layer whose weight lies in float8 GEMMs alone, for calls outside the hand-ordered step.

    Activations are not quantised. Each call dequantises the weight.
    """

    def __init__(self, linear: nn.Linear, quantised: Sequence[QuantisedPart]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._dtype = linear.weight.dtype
        self._places = [(one.part.rows, one.part.columns) for one in quantised]
        for number, one in enumerate(quantised):
            self.register_buffer(f"values_{number}", one.values.values_RC)
            self.register_buffer(f"scale_{number}", one.values.scale_R1)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, in the dtype of the original one."""
        weight_NK = self.get_buffer("scale_0").new_empty(self.out_features, self.in_features, dtype=self._dtype)
        for number, (rows, columns) in enumerate(self._places):
            values, scale = self.get_buffer(f"values_{number}"), self.get_buffer(f"scale_{number}")
            weight_NK[rows, columns] = values.to(self._dtype) * scale.to(self._dtype)
        return weight_NK

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def make_gemm(
    parts: Sequence[WeightPart], bias_N: Tensor | None, precision: Precision, activation: Activation = "gelu"
) -> Gemm:
    """Return a GEMM of one part of a weight, or of several that are quantised."""
    if precision == "fp8":
        return Float8Gemm(parts, bias_N, activation)
    (part,) = parts
    return NativeGemm(part.of(part.parameter), bias_N, activation)


def stack_gemm(linears: Sequence[Any], precision: Precision, activation: Activation = "gelu") -> Gemm:
    """Return a GEMM of all ``linears``. Biases become views of its own one; so do weights that are not quantised."""
    bias_N = _stack_biases(linears)
    if precision == "fp8":
        return Float8Gemm([WeightPart(parameter=linear.weight) for linear in linears], bias_N, activation)
    weight_NK = torch.cat([linear.weight.detach() for linear in linears])
    for linear, rows in _rows_of(linears):
        linear.weight.data = weight_NK[rows]
    return NativeGemm(weight_NK, bias_N, activation)


def _stack_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    """Return the stacked bias, whose views the layers' own ones become; None if no layer has one."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if not biases:
        return None
    zero = biases[0].new_zeros
    bias_N = torch.cat([zero(each.out_features) if each.bias is None else each.bias.detach() for each in linears])
    for linear, rows in _rows_of(linears):
        if linear.bias is not None:
            linear.bias.data = bias_N[rows]
    return bias_N


def _rows_of(linears: Sequence[nn.Linear]) -> Iterator[tuple[nn.Linear, slice]]:
    start = 0
    for linear in linears:
        yield linear, slice(start, start + linear.out_features)
        start += linear.out_features
