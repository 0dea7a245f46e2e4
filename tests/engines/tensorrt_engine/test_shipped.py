"""The trained models through engine graphs: predictions of all ranks, and a whole picture of four ranks."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.model import Branch, DenoiserModel
from engines.parallel.local import plain_attention
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.plan_text import read_plan_text
from pipelines.loading import resolve_path, shipped_checkpoints
from pipelines.registry import load_family
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.engines.tensorrt_engine.all_ranks import SimulatedEngine, export_case, relative_error
from tests.engines.tensorrt_engine.conftest import Build

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3}
MIN_PSNR_DB = 40.0
PROMPTS = {"image": "a large red circle in the centre", "video": "a red circle moves from left to right"}

needs_checkpoints = pytest.mark.skipif(len(shipped_checkpoints()) < 2, reason="the trained models are not in this tree")
pytestmark = needs_checkpoints


def request_for(name: str, **changes: object) -> MediaRequest:
    path = resolve_path(name)
    defaults = load_family(path).defaults(path)
    made = MediaRequest(
        request_id="test",
        model=name,
        kind=defaults.kind,
        prompt=PROMPTS[defaults.kind],
        width=defaults.width,
        height=defaults.height,
        num_frames=defaults.num_frames,
        fps=defaults.fps,
        num_inference_steps=20,
        guidance_scale=defaults.guidance_scale,
        true_cfg_scale=1.0,
        seed=11,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@functools.cache
def first_branch(name: str, dtype: torch.dtype) -> Branch:
    """What the model is asked at the first step of a real prompt."""
    path = resolve_path(name)
    family = load_family(path)
    request = request_for(name)
    sampler = family.load_sampler(path, CPU, dtype)
    conditioning = family.load_text_encoder(path, CPU, dtype).encode(request)
    branch: Branch = sampler.branches(sampler.begin(request, conditioning))[0]
    return branch


def load(name: str, dtype: torch.dtype) -> DenoiserModel:
    path = resolve_path(name)
    return load_family(path).load_denoiser(path, CPU, dtype)


def cases() -> list[object]:
    every_run = {("flux-shapes", "ulysses", 4, torch.float32), ("wan-shapes", "allgather_kv", 2, torch.float16)}
    made = []
    for name in ("flux-shapes", "wan-shapes"):
        for strategy in ("ulysses", "allgather_kv", "hybrid", "tensor"):
            for width in (2, 4):
                for dtype in TOLERANCE:
                    if (strategy, width) != ("hybrid", 2):
                        case = (name, strategy, width, dtype)
                        marks = () if case in every_run else (pytest.mark.slow,)
                        made.append(pytest.param(*case, marks=marks, id=f"{name}-{strategy}{width}-{str(dtype)[6:]}"))
    return made


@pytest.mark.parametrize(("name", "strategy", "width", "dtype"), cases())
def test_trained_models_predict_alike_on_every_rank(
    build_plan: Build, name: str, strategy: str, width: int, dtype: torch.dtype
) -> None:
    model, branch = load(name, torch.float32), first_branch(name, torch.float32)
    module = model.modules[branch.module]
    model.set_kernel(module, plain_attention)
    with torch.no_grad():
        whole = model.forward(module, branch.inputs)
    half, asked = load(name, dtype), first_branch(name, dtype)
    case = export_case(half, asked.inputs, ParallelSpec.of(strategy, width))
    for prediction in case.predictions(asked.inputs):
        assert relative_error(prediction, whole) <= TOLERANCE[dtype]
    for target in ("sm89", "sm120"):
        text = read_plan_text(build_plan(case.exported.graph.serialized(), target))
        assert text is not None
        assert text.collectives == case.exported.graph.collectives()
        fused = case.exported.graph.num_attentions() if dtype == torch.float16 else 0
        assert text.num_fused_attentions == fused


def test_a_whole_picture_of_four_ranks() -> None:
    """20 steps; and with one exchange broken it is another picture."""
    name = "flux-shapes"
    model, branch = load(name, torch.float32), first_branch(name, torch.float32)
    case = export_case(model, branch.inputs, ParallelSpec.of("ulysses", 4))
    request = request_for(name)
    expected = load_pipeline(resolve_path(name), CPU, torch.float32).run(request)
    given = load_pipeline(resolve_path(name), CPU, torch.float32, SimulatedEngine(case=case, rank=3)).run(request)
    assert psnr_db(given, expected) >= MIN_PSNR_DB
    last = sum(case.exported.graph.collectives().values()) - 1
    broken = SimulatedEngine(case=case, rank=3, deaf={last})
    assert psnr_db(load_pipeline(resolve_path(name), CPU, torch.float32, broken).run(request), expected) < MIN_PSNR_DB


def psnr_db(given: np.ndarray, expected: np.ndarray) -> float:
    error = np.mean((given.astype(np.float64) - expected.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
