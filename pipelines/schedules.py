"""Number of forwards per step of a folder's scheduler, read without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipelines.defaults import Defaults
from pipelines.directory import part_class, read_config

SCHEDULER = "scheduler"
SECOND_ORDER = (
    "DPMSolverSDEScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
)
"""Diffusers' solvers with two forwards in each step but the last."""
MULTISTEP, WARM_UP_KEY = "PNDMScheduler", "skip_prk_steps"
"""A solver with warm-up steps, unless its configuration skips them."""
WARM_UP_STEPS, REPEATED_STEPS = 9, 1


def with_schedule(path: Path, defaults: Defaults) -> Defaults:
    """Return ``defaults`` with the forwards per step of the folder's scheduler."""
    name = part_class(path, SCHEDULER)
    if name in SECOND_ORDER:
        return replace(defaults, solver_order=2, extra_steps=-1)
    if name == MULTISTEP:
        skips = bool(read_config(path, SCHEDULER).get(WARM_UP_KEY, False))
        return replace(defaults, extra_steps=REPEATED_STEPS if skips else WARM_UP_STEPS)
    return defaults
