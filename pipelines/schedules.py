"""Forwards per step of a folder's scheduler, and the solver settings that requests may give. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipelines.defaults import Defaults
from pipelines.directory import part_class, read_config, read_index
from pipelines.solver import FLOW, NOISE, SolverLimits, own_name, predicts_flow

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


def with_schedule(
    path: Path,
    defaults: Defaults,
    schedulers: tuple[str, ...] = (),
    inputs: tuple[str, ...] = (),
    *,
    shifts: bool = False,
) -> Defaults:
    """Return ``defaults`` with the forwards per step of the folder's scheduler, and the solver's limits.

    ``schedulers`` are names that the model's blocks work with, ``inputs`` the schedules that they take. ``shifts``:
    requests may shift a schedule of the model's own.
    """
    name = part_class(path, SCHEDULER)
    if (schedulers or shifts) and name is not None:
        config = read_config(path, SCHEDULER)
        is_flow = predicts_flow(name, config)
        limits = SolverLimits(
            scheduler=own_name(name, config),
            schedulers=tuple(one for one in schedulers if one in (FLOW if is_flow else NOISE)),
            is_flow=is_flow,
            inputs=inputs,
            boundary_ratio=read_index(path).get("boundary_ratio"),
        )
        defaults = replace(defaults, solver=limits)
    if name in SECOND_ORDER:
        return replace(defaults, solver_order=2, extra_steps=-1)
    if name == MULTISTEP:
        skips = bool(read_config(path, SCHEDULER).get(WARM_UP_KEY, False))
        return replace(defaults, extra_steps=REPEATED_STEPS if skips else WARM_UP_STEPS)
    return defaults
