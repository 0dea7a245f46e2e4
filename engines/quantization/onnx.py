"""int8 and fp8: explicit quantize/dequantize pairs around the linears of the blocks, scales from a calibration pass.

Scales are symmetric, from the largest magnitude: one per tensor for activations, one per output feature for weights.
Everything else stays in the model's dtype, attention included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.model import DenoiserModel
from engines.core.shard_plan import ShardPlan
from engines.core.spec import Scheme
from engines.quantization.calibration import calibration_of, load_calibration
from engines.quantization.linear import FP8, LARGEST, fixed_scale, replace_linears, row_scales, stored

PER_TENSOR = -1


@torch.library.custom_op("troupe::quantize_dequantize", mutates_args=())
def quantize_dequantize(x: Tensor, scale: Tensor, axis: int, scheme: str) -> Tensor:
    """Round ``x`` to ``scheme`` and back. ``scale`` has one value (``axis`` -1) or one per entry of dim ``axis``."""
    wide = (
        scale.float() if axis == PER_TENSOR else scale.float().reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    )
    scaled = x.float() / wide
    largest = LARGEST["int8" if scheme == "int8" else "fp8"]
    if scheme == "int8":
        rounded = scaled.round().clamp(-largest - 1, largest)
    else:
        rounded = scaled.clamp(-largest, largest).to(FP8).float()
    return (rounded * wide).to(x.dtype)


@quantize_dequantize.register_fake
def _(x: Tensor, scale: Tensor, axis: int, scheme: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


QUANTIZE_DEQUANTIZE = torch.ops.troupe.quantize_dequantize.default


class QuantizedLinear(nn.Module):
    """A linear whose input and weight pass through ``scheme``. Scales are buffers: constants of the engine."""

    weight_scale: Tensor
    input_scale: Tensor

    def __init__(self, linear: nn.Linear, input_amax: float, scheme: Scheme) -> None:
        super().__init__()
        self.weight, self.bias, self._scheme = linear.weight, linear.bias, scheme
        dtype = linear.weight.dtype
        self.register_buffer("weight_scale", stored(row_scales(linear.weight.detach(), scheme).squeeze(-1), dtype))
        self.register_buffer("input_scale", stored(torch.tensor(fixed_scale(input_amax, scheme)), dtype))

    def forward(self, x: Tensor) -> Tensor:
        quantized_x = QUANTIZE_DEQUANTIZE(x, self.input_scale, PER_TENSOR, self._scheme)
        quantized_weight = QUANTIZE_DEQUANTIZE(self.weight, self.weight_scale, 0, self._scheme)
        return functional.linear(quantized_x, quantized_weight, self.bias)


def quantize(module: nn.Module, plan: ShardPlan, amax: Mapping[str, float], scheme: Scheme) -> nn.Module:
    """Replace the linears in place. ValueError if the calibration lacks one of them."""
    replace_linears(module, plan, lambda linear, largest: QuantizedLinear(linear, cast(float, largest), scheme), amax)
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """``quantize`` for an exporter."""

    plan: ShardPlan
    """Names the large layers."""
    amax: Mapping[str, float]
    """Largest absolute input of each layer in a calibration."""
    scheme: Scheme
    """Eight-bit format."""

    def __call__(self, module: nn.Module) -> nn.Module:
        return quantize(module, self.plan, self.amax, self.scheme)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.scheme, self.amax], sort_keys=True).encode()).hexdigest()


def quantization(model: DenoiserModel, name: str, scheme: Scheme, folder: Path) -> Quantization:
    """Return the exporter's quantisation of module ``name``, by the calibration in ``folder`` for its weights.

    ValueError if there is none.
    """
    path = calibration_of(model.modules[name], folder)
    if not path.exists():
        raise ValueError(
            f"precision {scheme}-static needs a calibration of these weights, and {path} does not exist: "
            f"run troupe build-engine --precision {scheme}-static --calibrate with this model and dtype first"
        )
    return Quantization(plan=model.plan, amax=load_calibration(path, name), scheme=scheme)
