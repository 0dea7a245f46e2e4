"""On a GPU, jobs with captured steps equal diffusers' own call, for models with blocks.

Each case is one of the tests on CPUs, with its checkpoint, its request and its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2ConditionPipeline
from torch import Tensor

from pipelines.checkpoint import Checkpoint
from pipelines.loading import ModelSource
from pipelines.solver import Solver
from tests.pipelines.blocks import test_solver as solver
from tests.pipelines.models import test_stable_diffusion as stable_diffusion
from tests.pipelines.models import test_video as video
from tests.pipelines.models.cosmos import test_cosmos as cosmos
from tests.pipelines.models.flux3 import test_flux3 as flux3
from tests.pipelines.models.helios import test_helios as helios
from tests.pipelines.models.ideogram4 import test_ideogram4 as ideogram
from tests.pipelines.models.ltx2 import test_in_context as in_context
from tests.pipelines.models.ltx2 import test_keyframes as keyframes
from tests.pipelines.models.ltx2 import test_two_stages as two_stages
from tests.pipelines.models.mini_max_h3 import test_references as minimax
from tests.pipelines.models.qwen_image import test_control as qwen_control
from tests.pipelines.models.wan_animate2 import test_wan_animate2 as animate
from tests.pipelines.models.wan_vace import test_wan_vace as vace
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_animate,
    tiny_flux3,
    tiny_ltx,
    tiny_minimax,
    tiny_models,
    tiny_others,
    tiny_whole,
)
from tests.pipelines.support.device_jobs import HALF_TOLERANCE, Job, Latents, check_jobs, made_on_cpu
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.own_call import own_latents
from tests.pipelines.support.references.picture_cases import PictureCase, pictures_of, request_of
from tests.pipelines.support.references.video import Clip
from tests.pipelines.support.references.video import pictures_of as clip_inputs
from training.latents import pack

pytestmark = pytest.mark.gpu

Make = Callable[[Path], Path]


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """``job`` makes a job for the checkpoint's folder, ``choices`` are the engine's."""

    make: Make
    job: Callable[[Path], Job]
    choices: Mapping[str, Any] = field(default_factory=dict)
    source: Callable[[Path], str] = str
    """The checkpoint to open in the folder."""


def all_latents(values: Mapping[str, Any]) -> Latents:
    return {name: x for name, x in values.items() if name.endswith("latents") and isinstance(x, Tensor)}


def clip_case(clip: Clip, read: Callable[[Mapping[str, Any]], Latents] = all_latents) -> GpuCase:
    def job(folder: Path) -> Job:
        request = clip.request(folder)
        images = clip.images(request)
        return Job(
            request=request, inputs=clip_inputs(images), read=read, own=lambda one: clip.reference(folder, one, images)
        )

    return GpuCase(make=clip.make, job=job)


def chunks(values: Mapping[str, Any]) -> Latents:
    return {"latents": torch.cat(values["latent_chunks"], dim=2)}


def base_tokens(values: Mapping[str, Any]) -> Latents:
    """Return the latents of the clip, without those of its inputs."""
    return {**all_latents(values), "latents": values["latents"][:, : values["base_token_count"]]}


def in_context_job(name: str, folder: Path) -> Job:
    return Job(
        request=in_context.request_of(name, folder),
        inputs=in_context.along_with(name),
        read=base_tokens,
        own=lambda one: {"latents": in_context.own_latents(name, folder, one)},
    )


def keyframes_job(name: str, folder: Path) -> Job:
    conditions = keyframes.conditions_of(name)
    tokens = partial(own_clips.ltx2_tokens, LTX2ConditionPipeline, folder, conditions=conditions)
    return Job(
        request=keyframes.request_of(name, folder),
        inputs=clip_inputs(keyframes.images_of(name)),
        read=base_tokens,
        own=lambda one: {"latents": tokens(one)},
    )


def guided_keyframes_job(folder: Path) -> Job:
    name = "three"
    return Job(
        request=keyframes.request_of(name, folder, true_cfg_scale=3.0),
        inputs=clip_inputs(keyframes.images_of(name)),
        read=base_tokens,
        own=lambda one: own_clips.sounding_blocks(folder, one, (), conditions=keyframes.conditions_of(name)),
    )


def two_stages_job(name: str, folder: Path) -> Job:
    request, images = two_stages.by_blocks_case(name, folder)
    return Job(
        request=request,
        inputs=clip_inputs(images),
        read=all_latents,
        own=lambda one: two_stages.normal(folder, two_stages.by_blocks(folder, one, images)),
    )


def animate_job(name: str, folder: Path) -> Job:
    request = animate.request_of(name, folder)
    return Job(
        request=request,
        inputs=animate.inputs_of(request),
        read=lambda values: {"latents": animate.latents_of(values)},
        own=lambda one: {"latents": animate.own(folder, one).latents},
    )


def vace_job(name: str, folder: Path) -> Job:
    return Job(
        request=vace.request_of(name, folder),
        inputs=vace.inputs_of(name),
        own=lambda one: {"latents": vace.own(name, folder, one)},
    )


def qwen_control_job(folder: Path) -> Job:
    return Job(
        request=request_of(qwen_control.CASE, folder),
        inputs=pictures_of(qwen_control.CASE),
        read=lambda values: {"latents": pack(values["latents"][:, :, 0])},
        own=lambda one: {"latents": qwen_control.own_latents(folder, one)},
    )


def references_job(name: str, folder: Path) -> Job:
    """Return a job whose first step has fewer timesteps than the others: all rows begin at one."""
    return Job(
        request=minimax.request_of(name, folder, prompt="a red circle", num_inference_steps=4),
        inputs=minimax.along_with(name),
        read=all_latents,
        own=lambda one: minimax.own_latents(name, folder, one),
    )


def flux3_job(name: str, folder: Path) -> Job:
    case = flux3.CASES[name]
    return Job(
        request=request_of(case, folder),
        inputs=pictures_of(case),
        own=lambda one: {"latents": flux3.own_latents(folder, name, one)},
    )


def ideogram_job(folder: Path) -> Job:
    return Job(
        request=ideogram.request(folder, ideogram.STEADY),
        own=lambda one: {"latents": ideogram.own_images(folder, ideogram.STEADY, one)},
        like=lambda ours, _: ideogram.packed(ours),
    )


SDXL_CONTROL = PictureCase(
    make=tiny_whole.sdxl_controlled,
    pictures=(),
    has_control=True,
    num_steps=4,
    changes={"negative_prompt": "blue", **stable_diffusion.SETTINGS},
)


def sdxl_source(folder: Path) -> str:
    return str(ModelSource(base=str(folder / "sdxl"), network=str(folder / "controlnet")))


def sdxl_control_job(folder: Path) -> Job:
    return Job(
        request=request_of(SDXL_CONTROL, Checkpoint.open(sdxl_source(folder)).path),
        inputs=pictures_of(SDXL_CONTROL),
        own=lambda one: {"latents": stable_diffusion.classic_control(folder, one)},
    )


def solver_case(case: solver.Case) -> GpuCase:
    def job(folder: Path) -> Job:
        checkpoint = Checkpoint(folder)
        max_tokens = checkpoint.text_encoder().max_tokens
        return Job(
            request=solver.request_of(case, checkpoint),
            own=lambda one: {"latents": solver.theirs(case, folder, one, max_tokens)},
            like=solver.shaped_like,
        )

    return GpuCase(make=case.make, job=job)


def offloaded_case(make: Make, num_blocks: int = 1, scale: float = 1.0) -> GpuCase:
    """Return a case from words, with blocks in host memory."""

    def job(folder: Path) -> Job:
        case = solver.Case(make=make, solver=Solver(), scale=scale)
        request = replace(solver.request_of(case, Checkpoint(folder)), negative_prompt="blue")
        return Job(request=request, own=lambda one: {"latents": own_latents(folder, one)})

    return GpuCase(make=make, job=job, choices={"num_offloaded": num_blocks})


def offloaded_clip(clip: Clip) -> GpuCase:
    return replace(clip_case(clip), choices={"num_offloaded": 1})


CONTROLLED = GpuCase(make=qwen_control.CASE.make, job=qwen_control_job)
CASES: dict[str, GpuCase] = {
    **{
        f"ltx 2 in context, {name}": GpuCase(make=tiny_ltx.ltx2_few_layers, job=partial(in_context_job, name))
        for name in in_context.CASES
    },
    **{
        f"ltx 2 at frames, {name}": GpuCase(make=tiny_ltx.ltx2_few_layers, job=partial(keyframes_job, name))
        for name in keyframes.PLACES
    },
    **{
        f"ltx 2 in two passes, {name}": GpuCase(make=tiny_ltx.ltx2_two_stages, job=partial(two_stages_job, name))
        for name in two_stages.BY_BLOCKS
    },
    "ltx 2 at frames, guided": GpuCase(make=tiny_ltx.ltx2_few_layers, job=guided_keyframes_job),
    **{
        f"minimax h3 with references, {name}": GpuCase(
            make=tiny_minimax.minimax_h3_references, job=partial(references_job, name)
        )
        for name in minimax.CASES
    },
    "qwen control": CONTROLLED,
    "sdxl control": GpuCase(make=tiny_whole.sdxl_controlled, job=sdxl_control_job, source=sdxl_source),
    **{f"cosmos, {name}": clip_case(clip) for name, clip in cosmos.CLIPS.items()},
    **{f"flux 3, {name}": GpuCase(make=case.make, job=partial(flux3_job, name)) for name, case in flux3.CASES.items()},
    **{f"helios, {name}": clip_case(clip, chunks) for name, clip in helios.CASES.items()},
    "ideogram 4": GpuCase(make=tiny_others.ideogram4, job=ideogram_job),
    **{name: clip_case(clip) for name, clip in video.CLIPS.items()},
    **{
        f"wan animate 2, {name}": GpuCase(make=case.kind, job=partial(animate_job, name))
        for name, case in animate.CASES.items()
    },
    **{f"wan vace, {name}": GpuCase(make=case.make, job=partial(vace_job, name)) for name, case in vace.CASES.items()},
    "offloaded flux": offloaded_case(tiny.flux),
    "offloaded wan": offloaded_case(tiny.wan, scale=3.0),
    "offloaded ltx": offloaded_case(tiny_ltx.ltx, num_blocks=2, scale=3.0),
    "offloaded qwen": offloaded_case(tiny_models.qwen_image),
    "offloaded qwen control": GpuCase(make=qwen_control.CASE.make, job=qwen_control_job, choices={"num_offloaded": 1}),
    "offloaded cosmos": offloaded_clip(cosmos.CLIPS["with sound from a clip"]),
    "offloaded wan animate 2": GpuCase(
        make=tiny_animate.wan_animate2, job=partial(animate_job, animate.SOME), choices={"num_offloaded": 1}
    ),
    **{f"solver, {name}": solver_case(case) for name, case in solver.CASES.items()},
}
SOLVERS = ("wan, boundary", "wan, dpm++", "flux, unipc", "sdxl, ancestral")
HALF = [*(name for name in CASES if not name.startswith("solver")), *(f"solver, {name}" for name in SOLVERS)]
"""Cases in bfloat16 too: steps of the other solvers are the same models."""
COMPILED = {
    "ltx 2 in context, pictures too",
    "ltx 2 at frames, three",
    "ltx 2 at frames, guided",
    "minimax h3 with references, all",
    "qwen control",
    "sdxl control",
    "cosmos, from a clip",
    "cosmos, with sound from a clip",
    "helios, a clip",
    "helios, distilled, a clip",
    "wan 2.2 from a picture",
    "wan animate 2, distilled",
    "wan vace, two transformers",
    "ltx from a picture",
    "hunyuan from a picture",
    "solver, wan, boundary",
    "solver, flux, unipc",
    "solver, sdxl, ancestral",
}
"""One or two of each family, since a block takes seconds to compile. The others run modules, or fast steps."""


@pytest.fixture
def opened(
    folders: Callable[[Any], Path], gpu_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[GpuCase, torch.dtype], tuple[Checkpoint, Job]]:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny_minimax.LOAD_PROCESSOR, lambda *_, **__: tiny_minimax.MiniMaxProcessor())
    monkeypatch.setattr(tiny_flux3.LOAD_PROCESSOR, lambda *_, **__: tiny_flux3.Flux3Processor())

    def open_case(case: GpuCase, dtype: torch.dtype) -> tuple[Checkpoint, Job]:
        folder = folders(case.make)
        return Checkpoint.open(case.source(folder), gpu_device, dtype), case.job(folder)

    return open_case


Opened = Callable[[GpuCase, torch.dtype], tuple[Checkpoint, Job]]


@pytest.mark.parametrize("name", CASES)
def test_captured_jobs_equal_diffusers(name: str, opened: Opened) -> None:
    """Steps run in float32, by the modules themselves."""
    case = CASES[name]
    checkpoint, job = opened(case, torch.float32)
    check_jobs(checkpoint, job, compiled=False, fast=False, **case.choices)


@pytest.mark.parametrize("name", HALF)
def test_jobs_in_bfloat16_are_as_on_the_cpu(name: str, opened: Opened) -> None:
    """Blocks are compiled, or steps hand-ordered, as in a gang. PyTorch draws other noise in bfloat16."""
    case = CASES[name]
    checkpoint, job = opened(case, torch.bfloat16)
    compiled = None if name in COMPILED else False
    expected = made_on_cpu(checkpoint, job, **case.choices)
    check_jobs(checkpoint, expected, HALF_TOLERANCE, compiled=compiled, **case.choices)


def test_cases_that_are_compiled_are_known() -> None:
    assert set(HALF) >= COMPILED


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_quantised_model_follows_a_control_picture(precision: str, opened: Opened) -> None:
    checkpoint, job = opened(CONTROLLED, torch.bfloat16)
    expected = made_on_cpu(checkpoint, job, precision=precision)
    check_jobs(checkpoint, expected, HALF_TOLERANCE, precision=precision)
