"""Which layers are quantised, and how they are replaced: the same for both engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from engines.core.shard_plan import FullWidthNorm, ShardPlan

MULTIPLE = 16
"""Features that the matrix units take in one piece: layers with other sizes stay as they are."""


def quantizable(module: nn.Module, plan: ShardPlan) -> list[tuple[str, nn.Linear]]:
    """The linears named by the shard plan (all large ones are), if their features fit the matrix units.

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
    """Put ``make(linear, amax of its input)`` in place of each quantizable linear; returns how many there were.

    ``amax`` goes by layer name (see ``calibration``); without it activations are measured as they come, and ``make``
    gets None. Raises ``ValueError`` if it lacks a layer.
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
    """The layer of the unsplit module that this one is, or has a share of: see ``parallel.tensor.RowSplitLinear``."""
    return name.removesuffix(".partial")
