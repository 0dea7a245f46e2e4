"""Diffusers' schedulers as values: a step leaves the old scheduler as it was and returns a new one.

Schedulers count steps and (UniPC) keep a history inside themselves; two jobs must never share one, and a step that is
run twice must give the same latents twice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.directory import read_config

MODULES = {
    "FlowMatchEulerDiscreteScheduler": "diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "UniPCMultistepScheduler": "diffusers.schedulers.scheduling_unipc_multistep",
}

Scheduler = Any
"""A ``FlowMatchEulerDiscreteScheduler`` or ``UniPCMultistepScheduler``, timesteps on the CPU (no device syncs)."""


def load_scheduler(path: Path, allowed: Sequence[str]) -> Scheduler:
    """The scheduler of a diffusers directory, of the class that its configuration names."""
    class_name = read_config(path, "scheduler")["_class_name"]
    if class_name not in allowed:
        raise ValueError(f"{path} has a {class_name}; this family knows {', '.join(allowed)}")
    return getattr(import_module(MODULES[class_name]), class_name).from_pretrained(path / "scheduler")


def solve_step(scheduler: Scheduler, step: int, velocity: Tensor, latents: Tensor) -> tuple[Scheduler, Tensor]:
    """One solver step: the scheduler after it, and the latents at the next noise level."""
    after = _copied(scheduler)
    return after, after.step(velocity, scheduler.timesteps[step], latents, return_dict=False)[0]


def clean_estimate(scheduler: Scheduler, step: int, velocity: Tensor | None, latents: Tensor) -> Tensor:
    """What the finished latents look like from here: ``x0 = x - sigma * v``, with the newest velocity.

    Before the first step there is no velocity and the noise itself is returned; after the last, sigma is 0.
    """
    if velocity is None:
        return latents
    sigma = float(scheduler.sigmas[step])
    return (latents.float() - sigma * velocity.float()).to(latents.dtype)


def timesteps_on(scheduler: Scheduler, device: torch.device) -> Tensor:
    """All timesteps as float32 on ``device``, so that no step waits for a copy."""
    timesteps: Tensor = scheduler.timesteps.to(device=device, dtype=torch.float32)
    return timesteps


def _copied(scheduler: Scheduler) -> Scheduler:
    after = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if isinstance(value, list):
            setattr(after, name, list(value))
    return after
