"""Steps of a schedule: their number of forwards, and steps that reuse the previous prediction. Read without torch.

Steps that skip their forwards and reuse the previous prediction, chosen by the number of steps alone.

Predictions change much in the first steps and little from step to step later (``benchmarks/step_cache.py`` measures
it). A later step may reuse the previous prediction: in a fixed pattern as in FORA (Selvaraju et al. 2024,
arXiv:2407.01425), of the last layer alone, as TaylorSeer's lite form (Liu et al. 2025, arXiv:2503.06923) at order 0.
The pattern depends on numbers only, so all ranks of a gang agree.
"""

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
    """Return ``defaults`` with the folder's scheduler's forwards for each step."""
    name = part_class(path, SCHEDULER)
    if name in SECOND_ORDER:
        return replace(defaults, solver_order=2, extra_steps=-1)
    if name == MULTISTEP:
        skips = bool(read_config(path, SCHEDULER).get(WARM_UP_KEY, False))
        return replace(defaults, extra_steps=REPEATED_STEPS if skips else WARM_UP_STEPS)
    return defaults
