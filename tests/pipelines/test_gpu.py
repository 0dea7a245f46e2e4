"""On a GPU the same as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.pipelines.sample_requests import clip, picture

REQUESTS = {"tiny_flux": picture(true_cfg_scale=3.0), "tiny_wan": clip(true_cfg_scale=3.0)}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.3)], ids=str)
@pytest.mark.parametrize("name", REQUESTS)
def test_latents_equal_those_of_the_cpu(
    request: pytest.FixtureRequest, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    path: Path = request.getfixturevalue(name)
    wish: MediaRequest = REQUESTS[name]
    on_cpu = load_pipeline(path, torch.device("cpu"), torch.float32)
    on_gpu = load_pipeline(path, torch.device("cuda"), dtype)
    first = next(on_gpu.states(wish))
    assert {tensor.device.type for tensor in on_gpu.sampler.branches(first)[0].inputs.values()} == {"cuda"}
    if dtype == torch.float32:
        torch.testing.assert_close(on_gpu.denoise(wish), on_cpu.denoise(wish), rtol=0, atol=tolerance)
    difference = on_gpu.run(wish).astype(int) - on_cpu.run(wish).astype(int)
    assert abs(difference).mean() < 255 * tolerance / 10
