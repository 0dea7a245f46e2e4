"""int8 and fp8: explicit quantize/dequantize pairs round the linears of the blocks, scales from a calibration pass.

Symmetric scales from the largest magnitude seen: one per tensor for activations, one per output feature for weights.
Embedders, modulation (a single vector per step) and the last projection stay in the model's dtype, as does attention.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.shard_plan import ShardPlan

Kind = Literal["int8", "fp8"]
LARGEST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}
PER_TENSOR = -1
_SMALLEST_AMAX = 1e-6
_MODULATION = ("norm", "norm1", "norm2", "norm1_context", "norm2_context")


@torch.library.custom_op("troupe::quantize_dequantize", mutates_args=())
def quantize_dequantize(x: Tensor, scale: Tensor, axis: int, kind: str) -> Tensor:
    """``x`` rounded to ``kind`` and back. ``scale`` has one value (``axis`` -1) or one per entry of dim ``axis``."""
    wide = (
        scale.float() if axis == PER_TENSOR else scale.float().reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    )
    scaled = x.float() / wide
    largest = LARGEST["int8" if kind == "int8" else "fp8"]
    if kind == "int8":
        rounded = scaled.round().clamp(-largest - 1, largest)
    else:
        rounded = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
    return (rounded * wide).to(x.dtype)


@quantize_dequantize.register_fake
def _(x: Tensor, scale: Tensor, axis: int, kind: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


QUANTIZE_DEQUANTIZE = torch.ops.troupe.quantize_dequantize.default


class QuantizedLinear(nn.Module):
    """A linear whose input and weight pass through ``kind``. Scales are buffers: constants of the engine."""

    weight_scale: Tensor
    input_scale: Tensor

    def __init__(self, linear: nn.Linear, input_amax: float, kind: Kind) -> None:
        super().__init__()
        self.weight, self.bias, self._kind = linear.weight, linear.bias, kind
        amax = linear.weight.detach().float().abs().amax(dim=1).clamp(min=_SMALLEST_AMAX)
        self.register_buffer("weight_scale", (amax / LARGEST[kind]).to(linear.weight.dtype))
        input_scale = torch.tensor(max(input_amax, _SMALLEST_AMAX) / LARGEST[kind])
        self.register_buffer("input_scale", input_scale.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        quantized_x = QUANTIZE_DEQUANTIZE(x, self.input_scale, PER_TENSOR, self._kind)
        quantized_weight = QUANTIZE_DEQUANTIZE(self.weight, self.weight_scale, 0, self._kind)
        return functional.linear(quantized_x, quantized_weight, self.bias)


def quantized_linears(module: nn.Module, plan: ShardPlan) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers that quantization replaces: linears inside the blocks, modulation excepted."""
    for name, layer in module.named_modules():
        path = name.split(".")
        if isinstance(layer, nn.Linear) and path[0] in plan.blocks and not any(part in _MODULATION for part in path):
            yield name, layer


@contextmanager
def observed(module: nn.Module, plan: ShardPlan) -> Iterator[dict[str, float]]:
    """Record the largest input magnitude of every linear to be quantized, over all forwards made in this context."""
    amax: dict[str, float] = {}
    handles = []

    def watch(name: str, layer: nn.Linear) -> None:
        def look(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            amax[name] = max(amax.get(name, 0.0), float(args[0].detach().abs().max()))

        handles.append(layer.register_forward_pre_hook(look))

    for name, layer in quantized_linears(module, plan):
        watch(name, layer)
    try:
        yield amax
    finally:
        for handle in handles:
            handle.remove()


def quantize(module: nn.Module, plan: ShardPlan, amax: Mapping[str, float], kind: Kind) -> nn.Module:
    """Replace the linears in place. ValueError when calibration never reached one of them."""
    layers = list(quantized_linears(module, plan))
    missing = [name for name, _ in layers if name not in amax]
    if missing:
        raise ValueError(f"calibration saw no input of {len(missing)} linears ({missing[0]}, …): run every block once")
    for name, layer in layers:
        module.set_submodule(name, QuantizedLinear(layer, amax[name], kind))
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """``quantize`` for an exporter, by what one calibration saw."""

    plan: ShardPlan
    amax: Mapping[str, float]
    kind: Kind

    def __call__(self, module: nn.Module) -> nn.Module:
        return quantize(module, self.plan, self.amax, self.kind)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.kind, self.amax], sort_keys=True).encode()).hexdigest()
