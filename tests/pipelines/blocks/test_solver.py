"""Solver settings of requests give the latents of diffusers' pipelines with the user's scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_config
from pipelines.loading import PUBLISHED
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from pipelines.size import Size
from pipelines.solver import Solver, config_changes
from tests.pipelines.lora.support.every_model import MODELS, Model
from tests.pipelines.support.checkpoints import tiny, tiny_ltx, tiny_models, tiny_others, tiny_unknown
from tests.pipelines.support.references.own_call import own_state
from training.latents import pack

TOLERANCE = 1e-4
FLOW: dict[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
STATIC: dict[str, Any] = {"use_dynamic_shifting": False, "shift_terminal": None}
SIGMAS = (1.0, 0.8, 0.3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``scheduler`` is made from a pipeline's own one as diffusers' users do, ``call`` are the pipeline's arguments.

    ``is_modular``: the classic pipeline has no such argument.
    """

    make: Callable[[Path], Path]
    solver: Solver
    scheduler: str = ""
    config: Any = ()
    call: Any = ()
    boundary_ratio: float | None = None
    is_modular: bool = False
    scale: float = 1.0
    model: Model | None = None
    """Set if its pipeline is called in a way of its own."""


EULER, UNIPC, MULTISTEP = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"


def flow_cases(make: Callable[[Path], Path], *names: str, **more: Any) -> dict[str, Case]:
    """Return cases with a constant shift, own sigmas, both, and another scheduler."""
    both = Solver(flow_shift=1.5, sigmas=SIGMAS)
    cases = {
        "shift": Case(
            make=make, solver=Solver(flow_shift=3.0), scheduler=EULER, config={"shift": 3.0, **STATIC}.items()
        ),
        "sigmas": Case(make=make, solver=Solver(sigmas=SIGMAS), call={"sigmas": SIGMAS}.items()),
        "both": Case(
            make=make,
            solver=both,
            scheduler=EULER,
            config={"shift": 1.5, **STATIC}.items(),
            call={"sigmas": SIGMAS}.items(),
        ),
        "unipc": Case(
            make=make,
            solver=Solver(scheduler="unipc", flow_shift=2.0),
            scheduler=UNIPC,
            config={"flow_shift": 2.0, **FLOW, **STATIC}.items(),
        ),
    }
    return {name: replace(cases[name], **more) for name in names}


def cases_of(model: str, *names: str, **more: Any) -> dict[str, Case]:
    return flow_cases(MODELS[model].make, *names, model=MODELS[model], is_modular=True, **more)


def wan_cases() -> dict[str, Case]:
    two: dict[str, Any] = {"make": tiny.wan22, "scale": 4.0}
    return {
        "shift": Case(
            make=tiny.wan, solver=Solver(flow_shift=5.0), scheduler=UNIPC, config={"flow_shift": 5.0, **STATIC}.items()
        ),
        "euler": Case(
            make=tiny.wan,
            solver=Solver(scheduler="euler", flow_shift=5.0),
            scheduler=EULER,
            config={"shift": 5.0, **STATIC}.items(),
        ),
        "dpm++": Case(
            make=tiny.wan,
            solver=Solver(scheduler="dpm++", flow_shift=2.0),
            scheduler=MULTISTEP,
            config={"flow_shift": 2.0, **FLOW, **STATIC, "algorithm_type": "dpmsolver++"}.items(),
        ),
        "timesteps": Case(
            make=tiny.wan,
            scale=4.0,
            solver=Solver(scheduler="euler", flow_shift=1.0, timesteps=(1000.0, 750.0, 500.0, 250.0)),
            scheduler=EULER,
            config={"shift": 1.0, **STATIC}.items(),
            call={"timesteps": (1000.0, 750.0, 500.0, 250.0)}.items(),
            is_modular=True,
        ),
        "sigmas": Case(
            make=tiny.wan,
            scale=4.0,
            solver=Solver(sigmas=SIGMAS),
            call={"sigmas": np.array(SIGMAS)}.items(),  # its scheduler computes with it
            is_modular=True,
        ),
        "second scale": Case(**two, solver=Solver(guidance_scale_2=2.0), call={"guidance_scale_2": 2.0}.items()),
        "second off": Case(**two, solver=Solver(guidance_scale_2=1.0), call={"guidance_scale_2": 1.0}.items()),
        "boundary": Case(**two, solver=Solver(boundary_ratio=0.5), boundary_ratio=0.5),
    }


def noise_cases() -> dict[str, Case]:
    euler = "EulerDiscreteScheduler"
    sdxl: dict[str, Any] = {"make": tiny_unknown.sdxl, "scale": 5.0}
    trailing = {"timestep_spacing": "trailing"}.items()
    return {
        "trailing": Case(**sdxl, solver=Solver(scheduler="euler_trailing"), scheduler=euler, config=trailing),
        "lcm": Case(**sdxl, solver=Solver(scheduler="lcm"), scheduler="LCMScheduler"),
        "ancestral": Case(
            **sdxl, solver=Solver(scheduler="euler_ancestral"), scheduler="EulerAncestralDiscreteScheduler"
        ),
        "timesteps": Case(
            **sdxl, solver=Solver(timesteps=(999.0, 500.0, 100.0)), call={"timesteps": (999, 500, 100)}.items()
        ),
    }


FAMILIES = {
    "flux": flow_cases(tiny.flux, "shift", "sigmas", "both", "unipc"),
    "qwen image": flow_cases(tiny_models.qwen_image, "both", "unipc"),
    "z image": flow_cases(tiny_models.z_image, "both"),
    "flux 2": flow_cases(tiny_models.flux2_klein, "both", "unipc", is_modular=True),
    "sd 3": flow_cases(tiny_others.sd3, "both"),
    "ltx": flow_cases(tiny_ltx.ltx, "both", is_modular=True, scale=3.0),
    "krea 2": flow_cases(tiny_others.krea2, "both", is_modular=True, scale=3.0),
    "ernie": flow_cases(tiny_others.ernie_image, "shift", is_modular=True, scale=3.0),
    "wan": wan_cases(),
    "sdxl": noise_cases(),
    "ltx 2": cases_of("ltx 2", "shift", "both"),
    "hunyuan video 1.5": cases_of("hunyuan video 1.5", "shift", "both", scale=3.0),
}
BESIDE = {
    "qwen 2.1": cases_of("qwen 2.1", "shift", "both"),
    "flux 3": cases_of("flux 3", "shift", "both"),
    "minimax h3": {
        "shift": Case(
            make=MODELS["minimax h3"].make,
            model=MODELS["minimax h3"],
            solver=Solver(flow_shift=6.0),
            scheduler="MiniMaxH3Scheduler",
            config={"shift": 6.0}.items(),
            is_modular=True,
        )
    },
}
"""Cases whose processors cannot be loaded here."""


def named(families: Mapping[str, Mapping[str, Case]]) -> dict[str, Case]:
    return {f"{family}, {name}": case for family, cases in families.items() for name, case in cases.items()}


CASES = named(FAMILIES)


def request_of(case: Case, checkpoint: Checkpoint) -> MediaRequest:
    defaults, steps = checkpoint.defaults, len(case.solver.sigmas or case.solver.timesteps) or 3
    if case.model is not None:
        own = {"solver": case.solver, "num_inference_steps": steps, "true_cfg_scale": case.scale}
        return replace(case.model, changes={**case.model.changes, **own}).request(checkpoint.path)
    height, width = (side * defaults.size_multiple for side in (3, 5))
    frames = None if defaults.kind == "image" else 1 + defaults.frame_multiple
    said = {"prompt": "a red circle", "seed": 5, "num_inference_steps": steps, "true_cfg_scale": case.scale}
    return defaults.request(Size(width=width, height=height, num_frames=frames), solver=case.solver, **said)


def change_solver(case: Case, pipeline: Any) -> None:
    if case.scheduler:
        made = getattr(diffusers, case.scheduler).from_config(pipeline.scheduler.config, **dict(case.config))
        (pipeline.update_components if case.is_modular else pipeline.register_modules)(scheduler=made)
    if case.boundary_ratio is not None:
        pipeline.register_to_config(boundary_ratio=case.boundary_ratio)


def theirs(case: Case, folder: Path, request: MediaRequest, max_tokens: int) -> Any:
    if case.model is not None:
        return case.model.reference(folder, request, (), partial(change_solver, case))["latents"]
    call = {name: list(value) if isinstance(value, tuple) else value for name, value in dict(case.call).items()}
    if case.is_modular:

        def change(pipeline: Any) -> None:
            change_solver(case, pipeline)

        latents: Tensor = own_state(folder, request, change=change, **call).get("latents")
        return latents
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    change_solver(case, pipeline)
    known = pipeline.__call__.__func__.__wrapped__.__code__.co_varnames
    guidance = {"guidance_scale": request.guidance_scale if "true_cfg_scale" in known else request.true_cfg_scale}
    if "Z" in type(pipeline).__name__ or "Flux2" in type(pipeline).__name__:
        guidance = {"guidance_scale": request.guidance_scale}
    said: dict[str, Any] = {"width": request.width, "height": request.height, "prompt": request.prompt, **guidance}
    if request.kind == "video":
        said["num_frames"] = request.num_frames
    if "max_sequence_length" in known:
        said["max_sequence_length"] = max_tokens
    output = pipeline(
        **said,
        **{"num_inference_steps": request.num_inference_steps, **call},
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    )
    return output.frames if request.kind == "video" else output.images


Loaded = Callable[[Any], tuple[Checkpoint, Pipeline]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    @cache
    def load(make: Any) -> tuple[Checkpoint, Pipeline]:
        checkpoint = Checkpoint(make(tmp_path_factory.mktemp("model")))
        return checkpoint, load_pipeline(checkpoint)

    return load


@pytest.mark.parametrize("name", [*CASES, *named(BESIDE)])
def test_latents_equal_those_of_diffusers(name: str, loaded: Loaded) -> None:
    case = (CASES | named(BESIDE))[name]
    with nullcontext() if case.model is None else case.model.world():
        checkpoint, pipeline = loaded(case.make)
        request = request_of(case, checkpoint)
        *states, last = pipeline.states(request)
        expected = theirs(case, checkpoint.path, request, pipeline.text_encoder.max_tokens)
    assert len(states) == checkpoint.num_steps(request)
    ours = pipeline.sampler.latents(last)["latents"]
    assert relative_difference(shaped_like(ours, expected), expected) <= TOLERANCE


def shaped_like(ours: Tensor, expected: Tensor) -> Tensor:
    """Return latents in the form of a classic pipeline, some as tokens."""
    if ours.shape == expected.shape:
        return ours
    return pack(ours.squeeze(2)) if expected.ndim == 3 else ours.reshape(expected.shape)


LIGHTNING = {"base_shift": math.log(3), "max_shift": math.log(3), "use_dynamic_shifting": True, "shift_terminal": None}
"""The schedule that the page of Qwen-Image-Lightning gives its pipeline."""


def scheduler_of(model: str, recipe: str) -> Any:
    """Return the scheduler of a shipped recipe, before its steps are set, and the recipe."""
    checkpoint = Checkpoint.open(str(PUBLISHED / model), weights=False)
    made = checkpoint.spec.recipes(checkpoint.path)[recipe]
    solver = Solver(scheduler=made.scheduler, flow_shift=made.flow_shift)
    config = read_config(checkpoint.path, "scheduler")
    name, changes = config_changes(solver, str(config["_class_name"]), config)
    return getattr(diffusers, name).from_config(dict(config), **changes), made


@pytest.mark.parametrize("num_steps", [4, 8])
def test_lightning_has_the_published_schedule(num_steps: int) -> None:
    """A dynamic shift between two equal ends is a constant one."""
    ours, recipe = scheduler_of("Qwen-Image", f"lightning-{num_steps}")
    assert recipe.num_inference_steps == num_steps
    config = read_config(PUBLISHED / "Qwen-Image", "scheduler")
    theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_config({**config, **LIGHTNING})
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=math.log(3))
    torch.testing.assert_close(ours.sigmas, theirs.sigmas, rtol=0, atol=1e-6)


FOUR_STEPS = [1000.0, 937.5, 2500 / 3, 625.0]
"""The timesteps 1000, 750, 500 and 250 with a shift of 5."""


@pytest.mark.parametrize(
    ("model", "recipe", "timesteps"),
    [
        ("Wan2.1-T2V-14B", "lightx2v-4", FOUR_STEPS),
        ("Wan2.2-T2V-A14B", "lightning-4", FOUR_STEPS),
        ("LTX-2", "distilled-8", [1000 * sigma for sigma in DISTILLED_SIGMA_VALUES]),
    ],
)
def test_distilled_steps_are_the_published_ones(model: str, recipe: str, timesteps: list[float]) -> None:
    scheduler, made = scheduler_of(model, recipe)
    scheduler.set_timesteps(sigmas=np.array(made.sigmas), mu=1.0)
    torch.testing.assert_close(scheduler.timesteps, torch.tensor(timesteps), rtol=0, atol=1e-3)


def test_a_recipe_of_a_u_net_suits_it() -> None:
    checkpoint = Checkpoint.open(str(PUBLISHED / "stable-diffusion-xl-base-1.0"), weights=False)
    recipes = checkpoint.spec.recipes(checkpoint.path)
    assert {"lightning-4", "lcm-4"} <= recipes.keys()
    for recipe in recipes.values():
        changes: dict[str, Any] = {"true_cfg_scale": 1.0, "num_inference_steps": recipe.num_inference_steps}
        checkpoint.defaults.request(solver=Solver(scheduler=recipe.scheduler), **changes)
