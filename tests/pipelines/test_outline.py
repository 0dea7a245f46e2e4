"""Models and conditionings can be made from configurations alone, for engines that are prepared ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.encoder import BlocksEncoder
from pipelines.blocks.opened import OpenedPipeline
from pipelines.blocks.sampler import BlocksSampler
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from tests.pipelines.support.sample_requests import clip, picture

CPU = torch.device("cpu")


@pytest.fixture(params=["tiny_flux", "tiny_wan"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def request_for(path: Path, **changes: object) -> MediaRequest:
    return (picture if Checkpoint(path).defaults.kind == "image" else clip)(**changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_outline_has_the_names_shapes_and_dtypes_of_the_loaded_model(path: Path, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint(path, CPU, dtype)
    loaded = checkpoint.denoiser()
    with FakeTensorMode():
        outline = checkpoint.outline()
    assert list(outline.modules) == list(loaded.modules)
    assert (outline.plan, outline.num_heads, outline.head_dim) == (loaded.plan, loaded.num_heads, loaded.head_dim)
    for name, module in loaded.modules.items():
        assert signature(outline.modules[name].named_parameters) == signature(module.named_parameters)
        assert signature(outline.modules[name].named_buffers) == signature(module.named_buffers)
        assert all(isinstance(weight, FakeTensor) for weight in outline.modules[name].parameters())


def signature(tensors: Callable[[], object]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("true_cfg_scale", [1.0, 4.0])
def test_blank_conditioning_is_shaped_like_an_encoded_prompt(path: Path, true_cfg_scale: float) -> None:
    opened, request = (
        OpenedPipeline(path, CPU, torch.float32),
        request_for(path, true_cfg_scale=true_cfg_scale, negative_prompt=""),
    )
    encoder, sampler = BlocksEncoder(opened, 512), BlocksSampler(opened)
    encoded, blank = encoder.encode(request), blank_conditioning(opened, request, encoder.max_tokens)
    asked, expected = (sampler.branches(sampler.begin(request, each)) for each in (blank, encoded))
    assert [shapes(branch.inputs) for branch in asked] == [shapes(branch.inputs) for branch in expected]


def shapes(inputs: object) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors: dict[str, Tensor] = dict(inputs)  # type: ignore[call-overload]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
