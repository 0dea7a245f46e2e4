"""Linear layers in float8 and int8, swapped in for ``nn.Linear`` wherever a module runs as it is.

Weights carry one scale per output feature. Activations carry one per row, measured as they come, or one fixed scale
from a calibration. Plain PyTorch: Inductor fuses the quantisation into what comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.shard_plan import FullWidthNorm, ShardPlan
from engines.fast.kernels.rows import FP8, FP8_MAX, SMALLEST_AMAX, quantized

Scheme = Literal["fp8", "int8"]
INT8_MAX = 127.0
MULTIPLE = 16
"""Features that the matrix units take in one piece: layers with other sizes stay as they are."""


class QuantLinear(nn.Module):
    """Common to both: features, bias, and the activation's ``amax`` (None: measured for every row)."""

    weight_NK: Tensor
    scale_1N: Tensor

    def __init__(self, linear: nn.Linear, amax: float | None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.amax = amax

    def forward(self, x: Tensor) -> Tensor:
        x_RK = x.reshape(-1, self.in_features)
        return self.rows(x_RK).view(*x.shape[:-1], self.out_features)

    def rows(self, x_RK: Tensor) -> Tensor:
        raise NotImplementedError

    def _steps(self, x_RK: Tensor, largest: float) -> Tensor:
        """``scale_R1``, float32."""
        if self.amax is not None:
            return x_RK.new_full((x_RK.shape[0], 1), max(self.amax, SMALLEST_AMAX) / largest, dtype=torch.float32)
        return x_RK.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_AMAX) / largest


class Float8Linear(QuantLinear):
    """e4m3 on both sides (arXiv:2209.05433). Emulated in float32 where the device has no float8 product."""

    def __init__(self, linear: nn.Linear, amax: float | None = None) -> None:
        super().__init__(linear, amax)
        weight = quantized(linear.weight.detach())
        self.register_buffer("weight_NK", weight.values_RC)
        self.register_buffer("scale_1N", weight.scale_R1.t().contiguous())

    def rows(self, x_RK: Tensor) -> Tensor:
        scale_R1 = self._steps(x_RK, FP8_MAX)
        values_RK = (x_RK.float() / scale_R1).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        if x_RK.is_cuda:
            return torch._scaled_mm(
                values_RK, self.weight_NK.t(), scale_a=scale_R1, scale_b=self.scale_1N, bias=self.bias,
                out_dtype=x_RK.dtype, use_fast_accum=True,
            )  # fmt: skip
        product_RN = functional.linear(values_RK.float(), self.weight_NK.float()) * scale_R1 * self.scale_1N
        return _with_bias(product_RN, self.bias, x_RK.dtype)


class Int8Linear(QuantLinear):
    """Symmetric int8 on both sides, accumulated in int32 (arXiv:2208.07339 without the outliers)."""

    def __init__(self, linear: nn.Linear, amax: float | None = None) -> None:
        super().__init__(linear, amax)
        weight_NK = linear.weight.detach().float()
        scale_N1 = weight_NK.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX) / INT8_MAX
        self.register_buffer("weight_NK", (weight_NK / scale_N1).round().to(torch.int8))
        self.register_buffer("scale_1N", scale_N1.t().contiguous())

    def rows(self, x_RK: Tensor) -> Tensor:
        scale_R1 = self._steps(x_RK, INT8_MAX)
        values_RK = (x_RK.float() / scale_R1).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        num_rows = values_RK.shape[0]
        if x_RK.is_cuda and num_rows <= MULTIPLE:  # the product wants more rows than that
            values_RK = functional.pad(values_RK, (0, 0, 0, MULTIPLE + 1 - num_rows))
        product_RN = torch._int_mm(values_RK, self.weight_NK.t())[:num_rows].float() * scale_R1 * self.scale_1N
        return _with_bias(product_RN, self.bias, x_RK.dtype)


LAYERS: Mapping[Scheme, type[QuantLinear]] = {"fp8": Float8Linear, "int8": Int8Linear}


def swap_linears(module: nn.Module, plan: ShardPlan, scheme: Scheme, amax: Mapping[str, float] | None = None) -> int:
    """Put quantised layers in place of the large linears that ``plan`` names; the number of layers swapped.

    ``amax`` (by layer name, see ``calibration``) fixes the scale of the activations. Raises ``ValueError`` if it lacks
    a layer.
    """
    names = [name for name, layer in quantizable(module, plan)]
    missing = [name for name in names if amax is not None and _whole(name) not in amax]
    if missing:
        raise ValueError(
            f"the calibration has no entry for {len(missing)} of {len(names)} layers, such as {missing[0]}"
        )
    for name in names:
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        module.set_submodule(name, LAYERS[scheme](linear, None if amax is None else amax[_whole(name)]))
    return len(names)


def quantizable(module: nn.Module, plan: ShardPlan) -> list[tuple[str, nn.Linear]]:
    """The linears named by the shard plan (all large ones are), if their features fit the matrix units."""
    patterns = [entry.pattern for entry in plan.linears if not isinstance(entry, FullWidthNorm)]
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and any(fnmatchcase(_whole(name), pattern) for pattern in patterns)
        and layer.in_features % MULTIPLE == 0
        and layer.out_features % MULTIPLE == 0
    ]


def _whole(name: str) -> str:
    """The layer of the unsplit module that this one is, or has a share of: see ``tensor.RowSplitLinear``."""
    return name.removesuffix(".partial")


def _with_bias(product_RN: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (product_RN if bias_N is None else product_RN + bias_N.float()).to(dtype)
