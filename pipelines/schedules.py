"""How many forwards a schedule takes for the steps that a request asks for. Read without torch."""

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
"""Diffusers' solvers that look twice at each step but the last."""
MULTISTEP, WARM_UP_KEY = "PNDMScheduler", "skip_prk_steps"
"""A solver that begins with steps of another kind, unless its configuration skips them."""
WARM_UP_STEPS, REPEATED_STEPS = 9, 1


def with_schedule(path: Path, defaults: Defaults) -> Defaults:
    """``defaults`` with the steps that the scheduler of the folder makes of those of a request."""
    name = part_class(path, SCHEDULER)
    if name in SECOND_ORDER:
        return replace(defaults, solver_order=2, extra_steps=-1)
    if name == MULTISTEP:
        skips = bool(read_config(path, SCHEDULER).get(WARM_UP_KEY, False))
        return replace(defaults, extra_steps=REPEATED_STEPS if skips else WARM_UP_STEPS)
    return defaults
