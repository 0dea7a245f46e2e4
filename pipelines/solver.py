"""The solver settings of a request, and those that a model allows. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

MAX_SHIFT = 1000.0
MAX_SHOWN = 8
"""Values of a wrong schedule in a message."""
SIGMAS, TIMESTEPS = "sigmas", "timesteps"
SPACING = "timestep_spacing"
SHIFT = "shift"
SHIFTS = ("flow_shift", SHIFT)
"""Names of a constant shift in configurations of diffusers' schedulers."""
WITHOUT_DYNAMIC_SHIFT: Mapping[str, Any] = {"use_dynamic_shifting": False, "shift_terminal": None}
FLOW_PREDICTION: Mapping[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """How a request is denoised. Empty and None: as its model does."""

    scheduler: str = ""
    """A name in ``FLOW`` or ``NOISE``."""
    flow_shift: float | None = None
    """Constant shift of the schedule, in place of one that depends on the size."""
    sigmas: tuple[float, ...] = ()
    """Noise levels of the steps before the shift, from high to low, without the final 0."""
    timesteps: tuple[float, ...] = ()
    """Timesteps of the steps, from high to low, instead of ``sigmas``."""
    guidance_scale_2: float | None = None
    """``true_cfg_scale`` of the second transformer."""
    boundary_ratio: float | None = None
    """Share of the training's timesteps below which the second transformer is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedScheduler:
    """A scheduler of diffusers. All have one step for each timestep."""

    class_name: str
    """Its class in diffusers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys that differ from the configuration of the model's own scheduler."""
    inputs: tuple[str, ...] = ()
    """Schedules that its ``set_timesteps`` takes."""
    shift: str = ""
    """Name of the constant shift in its configuration."""


MULTISTEP: Mapping[str, Any] = {"algorithm_type": "dpmsolver++"}
FLOW: Mapping[str, NamedScheduler] = {
    "euler": NamedScheduler(class_name="FlowMatchEulerDiscreteScheduler", inputs=(SIGMAS, TIMESTEPS), shift="shift"),
    "unipc": NamedScheduler(
        class_name="UniPCMultistepScheduler", config=FLOW_PREDICTION, inputs=(SIGMAS,), shift="flow_shift"
    ),
    "dpm++": NamedScheduler(
        class_name="DPMSolverMultistepScheduler", config={**FLOW_PREDICTION, **MULTISTEP}, shift="flow_shift"
    ),
}
"""Schedulers for models of flow matching. None draws noise: their blocks pass no generator to a step."""
NOISE: Mapping[str, NamedScheduler] = {
    "euler": NamedScheduler(class_name="EulerDiscreteScheduler", inputs=(SIGMAS, TIMESTEPS)),
    "euler_trailing": NamedScheduler(
        class_name="EulerDiscreteScheduler", config={SPACING: "trailing"}, inputs=(SIGMAS, TIMESTEPS)
    ),
    "euler_ancestral": NamedScheduler(class_name="EulerAncestralDiscreteScheduler"),
    "dpm++": NamedScheduler(class_name="DPMSolverMultistepScheduler", config=MULTISTEP, inputs=(TIMESTEPS,)),
    "ddim": NamedScheduler(class_name="DDIMScheduler"),
    "lcm": NamedScheduler(class_name="LCMScheduler", inputs=(TIMESTEPS,)),
}
"""Schedulers for models that predict noise."""


def check_falling(name: str, values: tuple[float, ...], most: float) -> None:
    """Raise ValueError unless the ``values`` of a schedule fall, from at most ``most``, and are above 0."""
    falls = all(after < before for before, after in pairwise(values))
    if not values or not falls or not 0 < values[-1] <= values[0] <= most:
        given = ", ".join(f"{value:g}" for value in values[:MAX_SHOWN])
        more = ", …" if len(values) > MAX_SHOWN else ""
        raise ValueError(f"{name} is [{given}{more}]: it must fall from at most {most:g} to a last value above 0")


def check_guidance(true_cfg_scale: float, *, is_taken: bool) -> None:
    """Raise ValueError for classifier-free guidance if it is not ``is_taken``: the model's blocks would ignore it."""
    if true_cfg_scale > 1 and not is_taken:
        raise ValueError(
            f"true_cfg_scale is {true_cfg_scale:g}; this model takes no classifier-free guidance and no "
            "negative_prompt: leave both out"
        )


def predicts_flow(class_name: str | None, config: Mapping[str, Any]) -> bool:
    """Return whether a scheduler of this class and configuration is for flow matching."""
    return "FlowMatch" in str(class_name) or SHIFT in config or bool(config.get("use_flow_sigmas"))


def own_name(class_name: str | None, config: Mapping[str, Any]) -> str:
    """Return the name of a model's own scheduler; empty if it has none."""
    known = FLOW if predicts_flow(class_name, config) else NOISE
    fitting = [name for name, one in known.items() if one.class_name == class_name]
    exact = [name for name in fitting if known[name].config.get(SPACING, "") == config.get(SPACING)]
    return next(iter(exact + fitting), "")


def config_changes(solver: Solver, class_name: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return class and changed keys of the scheduler for ``solver``, given those of the model's own."""
    known = FLOW if predicts_flow(class_name, config) else NOISE
    shift = solver.flow_shift
    if not solver.scheduler:
        name = next((name for name in SHIFTS if name in config), SHIFTS[0])
        known_keys = {key: value for key, value in WITHOUT_DYNAMIC_SHIFT.items() if key in config}
        return class_name, {} if shift is None else {name: shift, **known_keys}
    chosen = known[solver.scheduler]
    changes = dict(chosen.config)
    if chosen.shift and shift is not None:
        changes |= {chosen.shift: shift, **WITHOUT_DYNAMIC_SHIFT}
    elif chosen.shift and chosen.class_name != class_name:  # another class has another name for it
        changes[chosen.shift] = next((config[name] for name in SHIFTS if name in config), 1.0)
    return chosen.class_name, changes


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverLimits:
    """Solver settings that a model's requests may have. Checks raise ValueError."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}  # the API's document has them

    scheduler: str = ""
    """Name of the model's own scheduler; empty if it has none."""
    schedulers: tuple[str, ...] = ()
    """Names that requests may give; none: the solver is fixed."""
    is_flow: bool = False
    """True if there is a ``flow_shift``."""
    inputs: tuple[str, ...] = ()
    """Schedules that the pipeline takes: ``sigmas``, ``timesteps``."""
    boundary_ratio: float | None = None
    """Default of a model with two transformers; None: it has one."""

    def checks(self, solver: Solver, true_cfg_scale: float) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield every check with the field that it is about."""
        yield "scheduler", partial(self.check_scheduler, solver.scheduler)
        yield "flow_shift", partial(self.check_shift, solver.flow_shift)
        yield SIGMAS, partial(self.check_schedule, SIGMAS, solver)
        yield TIMESTEPS, partial(self.check_schedule, TIMESTEPS, solver)
        yield "guidance_scale_2", partial(self.check_second_scale, solver.guidance_scale_2, true_cfg_scale)
        yield "boundary_ratio", partial(self.check_boundary, solver.boundary_ratio)

    def check_scheduler(self, name: str) -> None:
        if name and name not in self.schedulers:
            allowed = f"it must be one of {', '.join(self.schedulers)}" if self.schedulers else "this model's is fixed"
            raise ValueError(f"scheduler is {name!r}; {allowed}")

    def check_shift(self, shift: float | None) -> None:
        if shift is None:
            return
        if not self.is_flow:
            raise ValueError(f"flow_shift is {shift:g}; this model's schedule has none: leave it out")
        if not 0 < shift <= MAX_SHIFT:
            raise ValueError(f"flow_shift is {shift:g}; it must be above 0 and at most {MAX_SHIFT:g}")

    def check_schedule(self, name: str, solver: Solver) -> None:
        """Check the steps that ``solver`` gives as ``name``."""
        values: tuple[float, ...] = getattr(solver, name)
        if not values:
            return
        if solver.sigmas and solver.timesteps:
            raise ValueError("sigmas and timesteps exclude each other; give one of them")
        known, chosen = FLOW if self.is_flow else NOISE, solver.scheduler or self.scheduler
        if name not in self.inputs:
            raise ValueError(f"this model takes no {name}: leave them out")
        if name not in (known[chosen].inputs if chosen in known else ()):
            fitting = ", ".join(one for one in self.schedulers if name in known[one].inputs) or "none"
            raise ValueError(f"scheduler {chosen or 'of this model'} takes no {name}; those that do: {fitting}")
        most = 1.0 if name == SIGMAS and self.is_flow else 1000.0
        check_falling(name, values, most)

    def check_second_scale(self, scale: float | None, true_cfg_scale: float) -> None:
        if scale is None:
            return
        if self.boundary_ratio is None:
            raise ValueError(f"guidance_scale_2 is {scale:g}; this model has one transformer: leave it out")
        if scale > 1 and true_cfg_scale <= 1:
            raise ValueError(
                f"guidance_scale_2 is {scale:g}, and guidance is off; set true_cfg_scale above 1, or leave it out"
            )

    def check_boundary(self, ratio: float | None) -> None:
        if ratio is None:
            return
        if self.boundary_ratio is None:
            raise ValueError(f"boundary_ratio is {ratio:g}; this model has one transformer: leave it out")
        if not (math.isfinite(ratio) and 0 <= ratio <= 1):
            raise ValueError(f"boundary_ratio is {ratio:g}; it must be from 0 to 1")


NO_SOLVER_LIMITS = SolverLimits()
AS_THE_MODEL = Solver()
