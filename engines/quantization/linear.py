"""Linear layers in float8 and int8, in place of ``nn.Linear`` in eager modules.

Weights carry one scale per output feature. Activations carry one per row, computed dynamically, or one fixed scale
from a calibration. Plain PyTorch: Inductor fuses the quantisation into the operator before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.core.shard_plan import FullWidthNorm, ShardPlan
from engines.core.spec import Scheme
from engines.core.torch_private import int_mm, scaled_mm

FP8 = torch.float8_e4m3fn
LARGEST: dict[Scheme, float] = {"fp8": 448.0, "int8": 127.0}
SMALLEST_AMAX = 1e-12
"""Keeps the scale of zeros finite."""


def row_scales(x_RC: Tensor, scheme: Scheme) -> Tensor:
    """Return ``scale_R1``, float32: one per row."""
    return x_RC.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_AMAX) / LARGEST[scheme]


def weight_scales(weight_NK: Tensor, scheme: Scheme) -> Tensor:
    """Return ``row_scales`` in one pass over ``weight_NK``, without a copy, for weights that change between steps."""
    lowest_N1, highest_N1 = weight_NK.aminmax(dim=-1, keepdim=True)
    return torch.maximum(-lowest_N1, highest_N1).float().clamp(min=SMALLEST_AMAX) / LARGEST[scheme]


def fixed_scale(amax: float, scheme: Scheme) -> float:
    """Return the scale of a whole tensor whose largest magnitude is ``amax``."""
    return max(amax, SMALLEST_AMAX) / LARGEST[scheme]


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` in ``dtype``; an underflow to 0 becomes the smallest normal number."""
    narrow = scale.to(dtype)
    return torch.where(narrow == 0, torch.finfo(dtype).tiny, narrow)


MULTIPLE = 16
"""Features per tile of the matrix units: layers with other sizes stay as they are."""


def quantizable(module: nn.Module, plan: ShardPlan) -> list[tuple[str, nn.Linear]]:
    """Return the linears named by the shard plan (all large ones) whose features fit the matrix units.

    Embedders, modulation (a single vector per step) and the last projection stay in the model's dtype.
    """
    rules = [rule for rule in plan.linears if not isinstance(rule, FullWidthNorm)]
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and any(rule.matches(whole_name(name)) for rule in rules)
        and layer.in_features % MULTIPLE == 0
        and layer.out_features % MULTIPLE == 0
    ]


def weights_to_quantise(module: nn.Module, plan: ShardPlan) -> frozenset[str]:
    """Return the names of the weights that ``replace_linears`` replaces. Until then they may lie on the host."""
    return frozenset(f"{name}.weight" for name, _ in quantizable(module, plan))


def compute_device(weight: Tensor) -> torch.device:
    """Return where ``weight`` is quantised: on its own device, or on torch's default one if it lies on the host."""
    return torch.get_default_device() if weight.device.type == "cpu" else weight.device


def move_from_host(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move the parameters that lie on the host to ``device``; they stay the same objects."""
    for parameter in parameters:
        if parameter.device.type == "cpu" != device.type:
            parameter.data = parameter.data.to(device)


def replace_linears(
    module: nn.Module,
    plan: ShardPlan,
    make: Callable[[nn.Linear, float | None], nn.Module],
    amax: Mapping[str, float] | None = None,
) -> int:
    """Replace each quantizable linear by ``make(linear, amax of its input)``; return how many there were.

    ``amax`` goes by layer name (see ``calibration``). Without it ``make`` gets None, and activations are scaled
    dynamically. Raises ``ValueError`` if it lacks a layer.
    """
    layers = quantizable(module, plan)
    missing = [name for name, _ in layers if amax is not None and whole_name(name) not in amax]
    if missing:
        raise ValueError(
            f"the calibration has no entry for {len(missing)} of {len(layers)} layers, such as {missing[0]}: "
            "run every block once"
        )
    names = [name for name, _ in layers]
    layers.clear()  # each weight goes as soon as its layer is replaced
    for name in names:
        layer: Any = module.get_submodule(name)
        module.set_submodule(name, make(layer, None if amax is None else amax[whole_name(name)]))
        del layer
    return len(names)


def whole_name(name: str) -> str:
    """Return the layer's name in the unsplit module: see ``parallel.tensor.RowSplitLinear``."""
    return name.removesuffix(".partial")


class QuantLinear(nn.Module):
    """Base class: features, bias, and the activation's ``amax`` (None: computed for every row).

    A weight that lies on the host is quantised on torch's default device.
    """

    scheme: ClassVar[Scheme]
    dtype: ClassVar[torch.dtype]
    weight_NK: Tensor
    scale_1N: Tensor

    def __init__(self, linear: nn.Linear, amax: float | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self._loaded_in = linear.bias, linear.weight.dtype
        self.amax = amax
        weight_NK = linear.weight.detach()
        values_NK, scale_N1 = self._scaled(weight_NK.to(compute_device(weight_NK)))
        self.register_buffer("weight_NK", values_NK.to(self.dtype))
        self.register_buffer("scale_1N", scale_N1.t().contiguous())

    def write_weight(self, weight_NK: Tensor) -> None:
        """Set another weight, in place: captured steps use it."""
        values_NK, scale_N1 = self._scaled(weight_NK.to(self._loaded_in))
        self.weight_NK.copy_(values_NK)
        self.scale_1N.copy_(scale_N1.t())

    def _scaled(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``values_NK``, float32, not yet in ``dtype``, and ``scale_N1``."""
        scale_N1 = weight_scales(weight_NK, self.scheme)
        values_NK = weight_NK / scale_N1
        return values_NK if self.dtype.is_floating_point else values_NK.round_(), scale_N1

    def forward(self, x: Tensor) -> Tensor:
        x_RK = x.reshape(-1, self.in_features)
        return self.rows(x_RK).view(*x.shape[:-1], self.out_features)

    def rows(self, x_RK: Tensor) -> Tensor:
        raise NotImplementedError

    def _scales(self, x_RK: Tensor) -> Tensor:
        """Return ``scale_R1``, float32."""
        if self.amax is not None:
            return x_RK.new_full((x_RK.shape[0], 1), fixed_scale(self.amax, self.scheme), dtype=torch.float32)
        return row_scales(x_RK, self.scheme)


class Float8Linear(QuantLinear):
    """e4m3 on both sides (arXiv:2209.05433). Emulated in float32 where the device has no float8 product."""

    scheme, dtype = "fp8", FP8

    def rows(self, x_RK: Tensor) -> Tensor:
        scale_R1 = self._scales(x_RK)
        values_RK = (x_RK.float() / scale_R1).clamp(-LARGEST["fp8"], LARGEST["fp8"]).to(FP8)
        if x_RK.is_cuda:
            return scaled_mm(
                values_RK, self.weight_NK.t(), scale_a=scale_R1, scale_b=self.scale_1N, bias=self.bias,
                out_dtype=x_RK.dtype, use_fast_accum=True,
            )  # fmt: skip
        product_RN = functional.linear(values_RK.float(), self.weight_NK.float()) * scale_R1 * self.scale_1N
        return _with_bias(product_RN, self.bias, x_RK.dtype)


class Int8Linear(QuantLinear):
    """Symmetric int8 on both sides, accumulated in int32 (arXiv:2208.07339 without the outliers)."""

    scheme, dtype = "int8", torch.int8

    def rows(self, x_RK: Tensor) -> Tensor:
        scale_R1 = self._scales(x_RK)
        values_RK = (x_RK.float() / scale_R1).round().clamp(-LARGEST["int8"], LARGEST["int8"]).to(torch.int8)
        num_rows = values_RK.shape[0]
        if x_RK.is_cuda and num_rows <= MULTIPLE:  # the product needs more rows
            values_RK = functional.pad(values_RK, (0, 0, 0, MULTIPLE + 1 - num_rows))
        product_RN = int_mm(values_RK, self.weight_NK.t())[:num_rows].float() * scale_R1 * self.scale_1N
        return _with_bias(product_RN, self.bias, x_RK.dtype)


LAYERS: Mapping[Scheme, type[QuantLinear]] = {"fp8": Float8Linear, "int8": Int8Linear}


def swap_linears(
    module: nn.Module,
    plan: ShardPlan,
    scheme: Scheme,
    amax: Mapping[str, float] | None = None,
    on_host: Collection[str] = (),
) -> int:
    """Quantise in place the large linears that ``plan`` names; return how many. See ``replace_linears``.

    Layers whose weights have a name in ``on_host`` are moved there, each as soon as it is quantised.
    """
    offloaded = {id(weight) for name, weight in module.named_parameters() if name in on_host}

    def make(linear: nn.Linear, amax: float | None) -> nn.Module:
        is_offloaded = id(linear.weight) in offloaded
        layer = LAYERS[scheme](linear, amax)
        return layer.to("cpu") if is_offloaded else layer

    return replace_linears(module, plan, make, amax)


def _with_bias(product_RN: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (product_RN if bias_N is None else product_RN + bias_N.float()).to(dtype)
