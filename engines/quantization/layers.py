"""Selection and replacement of the quantised layers, the same for both engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from engines.core.shard_plan import FullWidthNorm, ShardPlan

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
    for name, layer in layers:
        module.set_submodule(name, make(layer, None if amax is None else amax[whole_name(name)]))
    return len(layers)


def whole_name(name: str) -> str:
    """Return the layer's name in the unsplit module: see ``parallel.tensor.RowSplitLinear``."""
    return name.removesuffix(".partial")
