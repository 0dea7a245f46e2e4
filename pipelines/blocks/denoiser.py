"""A pipeline's transformers as the engine's ``DenoiserModel``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
from torch import Tensor, nn

from engines.core.model import Arguments, DenoiserModel, device_of, dtype_of
from engines.parallel.local_attention import local_kernel
from pipelines.blocks.arguments import nested
from pipelines.models.spec import ModelSpec
from pipelines.solver import Solver, config_changes

SOUND_GUIDER = "audio_guider"
SECOND_GUIDER = "guider_2"
GUIDERS = ("guider", SECOND_GUIDER, SOUND_GUIDER)
SCHEDULER, BOUNDARY = "scheduler", "boundary_ratio"


@dataclass(frozen=True, slots=True)
class Forward:
    """Call a transformer as its pipeline does."""

    spec: ModelSpec
    """The family, whose ``forward`` is called."""

    def __call__(self, module: nn.Module, arguments: Arguments) -> Tensor:
        return self.spec.forward(module, nested(arguments))


def as_denoiser(
    modules: Mapping[str, Any], spec: ModelSpec, config: Mapping[str, Any], probe: Callable[[], Any]
) -> DenoiserModel:
    """Return ``modules`` with the plan of their class; their attention calls the local kernel."""
    for module in modules.values():
        spec.set_kernel(module, local_kernel(device_of(module), dtype_of(module)))
    num_heads, head_dim = spec.heads(config)
    return DenoiserModel(
        modules=dict(modules),
        plan=spec.shard_plan(config),
        num_heads=num_heads,
        head_dim=head_dim,
        stream_lengths=partial(spec.stream_lengths, config),
        set_kernel=spec.set_kernel,
        forward=Forward(spec),
        probe=probe,
        hoisted=spec.hoisted,
        hoisted_inputs=spec.hoisted_inputs,
        hoisted_features=spec.hoisted_features(config),
        hoisted_numbers=spec.hoisted_numbers(config),
        num_hoisted=spec.num_hoisted,
        hoists_by_blocks=spec.hoists_by_blocks,
        reads_values=spec.reads_values,
        dynamic_shapes=spec.dynamic_shapes,
        fast=spec.fast_weights(config),
        latents=spec.latents,
        timestep=spec.timestep,
    )


def guiders_of(pipeline: Any) -> tuple[str, ...]:
    """Return the parts of ``pipeline`` that combine predictions. Without any, it supports one prompt only."""
    return tuple(name for name in GUIDERS if getattr(pipeline, name, None) is not None)


def set_scale(pipeline: Any, scale: float, second: float | None = None) -> None:
    """Give ``pipeline`` copies of its guiders with this scale, one branch at 1. Sound keeps its own scale.

    ``second`` is the scale of the second transformer (None: the same). A guider that counts from the prompt's own
    prediction needs one less for the same picture.
    """
    for name in guiders_of(pipeline):
        guider = copy.copy(getattr(pipeline, name))
        own = second if name == SECOND_GUIDER and second is not None else scale
        if name != SOUND_GUIDER:
            guider.guidance_scale = own - counts_from_prompt(guider)
        guider.enable() if min(scale, own) > 1 else guider.disable()
        setattr(pipeline, name, guider)


def set_solver(pipeline: Any, solver: Solver) -> None:
    """Give ``pipeline`` the scheduler of ``solver``, made of its own one's configuration."""
    if not solver.scheduler and solver.flow_shift is None:
        return
    own = getattr(pipeline, SCHEDULER)
    class_name, changes = config_changes(solver, type(own).__name__, own.config)
    setattr(pipeline, SCHEDULER, getattr(diffusers, class_name).from_config(own.config, **changes))


def with_boundary(pipeline: Any, solver: Solver) -> Any:
    """Return ``pipeline``, or a copy that changes to its second transformer where ``solver`` says."""
    if solver.boundary_ratio is None:
        return pipeline
    own = copy.copy(pipeline)
    own.register_to_config(**{BOUNDARY: solver.boundary_ratio})
    return own


def counts_from_prompt(guider: Any) -> bool:
    """Return whether its scale is added to the prompt's own prediction, instead of the negative one."""
    return bool(getattr(guider, "use_original_formulation", False))


def apply_guidance(predictions: tuple[Tensor, ...], scale: float) -> Tensor:
    """Return one prediction from (prompt,) or (prompt, negative prompt)."""
    if len(predictions) == 1:
        return predictions[0]
    positive, negative = predictions
    return negative + scale * (positive - negative)
