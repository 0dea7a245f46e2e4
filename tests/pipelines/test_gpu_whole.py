"""On a GPU, pipelines without blocks give the pixels of their own call; steps are not captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines import test_whole_pipeline as whole
from tests.pipelines.support.checkpoints import tiny_whole, tiny_whole_qwen
from tests.pipelines.support.device_jobs import OTHER
from tests.pipelines.test_whole_compiled import ROUNDING, latents_of, warm

pytestmark = pytest.mark.gpu

Settings = dict[str, Any]
CONTROL: Settings = {"control_guidance_start": 0.25, "control_guidance_end": 0.75}
OVER: Settings = {"strength": 0.5, "negative_prompt": "fog"}
CONTROLLED: tuple[Settings, Settings] = (
    {**CONTROL, "num_inference_steps": 4, "control_scale": 0.5},
    {**CONTROL, "controlnet_conditioning_scale": 0.5},
)
SETTINGS: dict[Any, tuple[Settings, Settings]] = {
    tiny_whole.wan_over: (
        {**OVER, "num_inference_steps": 4, "true_cfg_scale": 2.0},
        {**OVER, "guidance_scale": 2.0},
    ),
    **dict.fromkeys(whole.CONTROLLED, CONTROLLED),
}
"""Settings of requests, and the equivalent arguments of the call."""
NOT_COMPILED = (tiny_whole.hidream, tiny_whole_qwen.kandinsky5, tiny_whole_qwen.kandinsky5_clips)
"""Pipelines that Dynamo refused on a CPU, or that computed other values on a GPU."""
MAKES = (*whole.QUICK, *whole.CLIPS, *whole.CONTROLLED, *whole.LARGE)


def in_turns(pipeline: Pipeline, requests: tuple[MediaRequest, ...]) -> list[NDArray[np.uint8]]:
    """Return the frames of jobs that run at the same time."""
    jobs = [pipeline.states(request, whole.pictures_of(request)) for request in requests]
    *_, last = zip(*jobs, strict=True)
    return [
        pipeline.decoder.decode(pipeline.sampler.latents(state), request)
        for state, request in zip(last, requests, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_jobs_in_turns_have_the_pixels_of_the_pipelines_own_call(
    make: whole.Make, dtype: torch.dtype, folders: Callable[[Any], Path], gpu_device: str
) -> None:
    checkpoint = Checkpoint(folders(make), gpu_device, dtype)
    settings, arguments = SETTINGS.get(make, ({}, {}))
    first = whole.request_of(checkpoint, **settings)
    second, pipeline = replace(first, **OTHER), load_pipeline(checkpoint)
    own = whole.own_pipeline(checkpoint.path, gpu_device, dtype)
    made = in_turns(pipeline, (first, second))
    for frames, request in zip(made, (first, second), strict=True):
        assert frames.std() > 5, "a picture of one colour would hide faults"
        assert np.array_equal(frames, whole.frames_by(own, request, **arguments))
    assert not np.array_equal(made[0], made[1])
    assert np.array_equal(pipeline.run(first, whole.pictures_of(first)), made[0])


@pytest.mark.parametrize("make", [tiny_whole.aura_flow, tiny_whole.chroma, tiny_whole.cogvideox])
def test_previews_are_decoded_there(make: whole.Make, folders: Callable[[Any], Path], gpu_device: str) -> None:
    """A clip has none."""
    checkpoint = Checkpoint(folders(make), gpu_device, torch.bfloat16)
    request, pipeline = whole.request_of(checkpoint), load_pipeline(checkpoint)
    _, state, *_ = pipeline.states(request)
    values = pipeline.sampler.preview(state)
    assert bool(values) == (request.kind == "image")
    if values:
        assert pipeline.decoder.preview(values, request).std() > 1


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_compiled_denoisers_draw_the_picture_of_the_eager_call(
    make: whole.Make, folders: Callable[[Any], Path], gpu_device: str
) -> None:
    """Pipelines that cannot be compiled run eagerly. A seed's bytes do not depend on jobs between."""
    compiled, eager = (Checkpoint(folders(make), gpu_device, torch.float32) for _ in range(2))
    engine = warm(compiled)
    assert engine.forwards == ("eager" if make in NOT_COMPILED else "compiled")
    settings, _ = SETTINGS.get(make, ({}, {}))
    request = whole.request_of(compiled, **settings)
    made, exact = latents_of(compiled, request), latents_of(eager, request)
    assert relative_difference(made, exact) < ROUNDING
    latents_of(compiled, replace(request, **OTHER))
    assert latents_of(compiled, request).equal(made)
