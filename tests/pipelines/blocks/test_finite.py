"""NaN and infinity end their job with a reason: a black picture would look like a success."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.core.engine import JobFailedError
from pipelines.checkpoint import Checkpoint
from pipelines.request import Lora, SecondStage
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.support.sample_requests import picture


@pytest.fixture(scope="module")
def pipeline(tiny_flux: Path) -> Pipeline:
    return load_pipeline(Checkpoint(tiny_flux))


def damaged(pipeline: Pipeline, value: float) -> Any:
    """Return the state after the last step of a job whose latents hold one such value."""
    *_, state = pipeline.states(picture(num_inference_steps=1))
    state.loop_state.latents = state.loop_state.latents.clone()
    state.loop_state.latents.flatten()[3] = value
    return state


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_fail_their_job(pipeline: Pipeline, value: float) -> None:
    state = damaged(pipeline, value)
    with pytest.raises(JobFailedError, match=r"the latents of this request are not finite .*float16"):
        pipeline.sampler.latents(state)
    with_adapters = replace(state, request=replace(state.request, loras=(Lora(name="hat"), Lora(name="ink"))))
    with pytest.raises(ValueError, match="with the adapters hat, ink: leave them out"):
        pipeline.sampler.latents(with_adapters)


def test_pixels_that_are_not_finite_fail_their_job(pipeline: Pipeline) -> None:
    """Auto-encoders may overflow: SDXL's does in float16."""
    request = picture(num_inference_steps=1)
    latents = pipeline.denoise(request)
    assert pipeline.decoder.decode(latents, request).any()
    broken = {**latents, "latents": torch.full_like(latents["latents"], float("nan"))}
    with pytest.raises(JobFailedError, match="the pixels of this request are not finite"):
        pipeline.decoder.decode(broken, request)
    with pytest.raises(JobFailedError, match="the pixels"):
        pipeline.decoder.decode_all(broken, request)
    second = SecondStage(scale=2.0, sigmas=(0.9,), loras=(Lora(name="hat"),))
    with pytest.raises(ValueError, match="with the adapters hat: leave them out"):
        pipeline.decoder.decode(broken, replace(request, second_stage=second))
