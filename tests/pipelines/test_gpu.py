"""A GPU gives the same results as the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.pipelines.support.sample_requests import clip, picture

REQUESTS = {"tiny_flux": picture(true_cfg_scale=3.0, negative_prompt=""), "tiny_wan": clip(true_cfg_scale=3.0)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REQUESTS)
def test_pictures_equal_those_of_the_cpu(request: pytest.FixtureRequest, name: str) -> None:
    path: Path = request.getfixturevalue(name)
    wish: MediaRequest = REQUESTS[name]
    on_cpu, on_gpu = (load_pipeline(Checkpoint(path, device, torch.float32)) for device in ("cpu", "cuda"))
    first = next(on_gpu.states(wish))
    assert {tensor.device.type for tensor in on_gpu.sampler.branches(first)[0].inputs.values()} == {"cuda"}
    torch.testing.assert_close(on_gpu.denoise(wish)["latents"], on_cpu.denoise(wish)["latents"], rtol=0, atol=2e-3)
    difference = on_gpu.run(wish).astype(int) - on_cpu.run(wish).astype(int)
    assert abs(difference).mean() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", REQUESTS)
def test_bfloat16_is_as_close_as_on_the_cpu(request: pytest.FixtureRequest, name: str) -> None:
    """The comparison with float32 is in the latents: auto-encoders with random weights amplify any difference."""
    path: Path = request.getfixturevalue(name)
    cases = (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16))
    exact, on_cpu, on_gpu = (
        load_pipeline(Checkpoint(path, device, dtype)).denoise(REQUESTS[name])["latents"] for device, dtype in cases
    )
    assert relative_difference(on_gpu, exact) < 1.5 * relative_difference(on_cpu, exact)
