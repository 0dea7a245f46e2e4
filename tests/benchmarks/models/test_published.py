"""Published models: all arithmetic is counted, and the engine gives the answer of diffusers' module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.models.published import PublishedModel
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size
from tests.pipelines.support.checkpoints import (
    tiny,
    tiny_cosmos,
    tiny_hunyuan,
    tiny_ltx,
    tiny_pictures,
    tiny_qwen,
    tiny_video,
)

CPU = torch.device("cpu")
PICTURE, CLIP = Size(width=96, height=96), Size(width=96, height=64, num_frames=9)
SOME: dict[str, tuple[Callable[[Path], Path], Size]] = {
    "qwen": (tiny_qwen.qwen, PICTURE),
    "z_image": (tiny_pictures.z_image, PICTURE),
    "flux2": (tiny_pictures.flux2_dev, PICTURE),
    "hunyuan_video": (tiny_hunyuan.hunyuan_video, CLIP),
    "cosmos": (tiny_cosmos.cosmos_with_sound, CLIP),
}
NUM_TOKENS = {"hunyuan_video": 1000}
"""Tokens of prompts: 32, but for a model whose steps with short prompts are little but attention."""
OTHERS: dict[str, tuple[Callable[[Path], Path], Size]] = {
    "wan from a picture": (tiny_video.wan_picture_two_experts, CLIP),
    "ltx2": (tiny_ltx.ltx2, CLIP),
}


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@torch.no_grad()
def test_its_step(name: str, tmp_path: Path) -> None:
    make, size = {**SOME, **OTHERS}[name]
    num_tokens = NUM_TOKENS.get(name, 32)
    model = PublishedModel.made(str(make(tmp_path)), CPU, torch.float32, size, num_tokens=num_tokens)
    expected, num_products = answer_and_flops(model)
    assert num_products < model.flop() < 2 * num_products, "attention is the rest"
    engine = TorchEngine(model.denoiser(), strategy="ulysses")
    (answer,) = engine.predict((model.branch,), (0,))
    assert relative_difference(answer.flatten(), expected) < 1e-5


@torch.no_grad()
def test_some_blocks_of_a_model_with_two_halves(tmp_path: Path) -> None:
    """The text's half, which is made once a job, has as few."""
    folder = str(tiny_cosmos.cosmos_with_sound(tmp_path))
    model = PublishedModel.made(folder, CPU, torch.float32, CLIP, num_tokens=32, num_blocks=1)
    assert model.blocks() == ((1, 3),)
    expected = model.call()
    assert relative_difference(model._values(model.whole, model.own_calls), expected) > 0.1
    engine = TorchEngine(model.denoiser(), strategy="ulysses")
    (answer,) = engine.predict((model.branch,), (0,))
    assert relative_difference(answer.flatten(), expected) < 1e-5


def test_what_its_class_keeps_in_float32_is_not_cast(tmp_path: Path) -> None:
    """Wan's embedding of time, norms and modulation stay in float32, as with diffusers' ``from_pretrained``."""
    from diffusers import WanTransformer3DModel

    folder = tiny.wan(tmp_path)
    theirs = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
    ours = PublishedModel.made(str(folder), CPU, torch.bfloat16, CLIP, num_tokens=32).module
    dtypes = {name: weight.dtype for name, weight in theirs.named_parameters()}
    assert {name: weight.dtype for name, weight in ours.named_parameters()} == dtypes
    assert len({*dtypes.values()}) == 2


@torch.no_grad()
def test_the_exact_step_is_in_float32_with_all_its_inputs(tmp_path: Path) -> None:
    """Z-Image's inputs are in lists."""
    folder = str(tiny_pictures.z_image(tmp_path))
    model = PublishedModel.made(folder, CPU, torch.bfloat16, PICTURE, num_tokens=32)
    exact = model.exact_call()
    assert exact.dtype == torch.float32
    assert 1e-4 < relative_difference(model.call().float(), exact) < 0.02


@pytest.mark.parametrize("expand_timesteps", [False, True])
def test_diffusers_is_called_at_the_time_of_its_own_schedule(expand_timesteps: bool, tmp_path: Path) -> None:
    """Its blocks round it to the dtype of the prompt: 999 becomes 1000, a few percent of an answer."""
    from diffusers import UniPCMultistepScheduler

    folder = tiny.wan(tmp_path, expand_timesteps=expand_timesteps)
    model = PublishedModel.made(str(folder), CPU, torch.bfloat16, CLIP, num_tokens=32)
    schedule = UniPCMultistepScheduler.from_pretrained(folder, subfolder="scheduler")
    schedule.set_timesteps(Checkpoint(folder).defaults.num_inference_steps)
    assert model.own_calls[0]["timestep"].tolist() == [float(schedule.timesteps[0])]


@torch.no_grad()
def test_both_branches_of_a_guided_step(tmp_path: Path) -> None:
    folder = str(tiny_qwen.qwen(tmp_path))
    one, both = (PublishedModel.made(folder, CPU, torch.float32, PICTURE, 32, number) for number in (1, 2))
    assert both.flop() == 2 * one.flop()
    first, second = expected = both.call().chunk(2)
    assert torch.equal(first, one.call())
    assert relative_difference(second, first) > 1e-3, "branches that are alike could be exchanged unseen"
    engine = TorchEngine(both.denoiser(), strategy="ulysses")
    for answer, own in zip(engine.predict(both.branches, (0,)), expected, strict=True):
        assert relative_difference(answer.flatten(), own) < 1e-5


def test_a_cpu_gets_a_small_size_where_none_is_said(tmp_path: Path) -> None:
    model = PublishedModel.made(str(tiny_cosmos.cosmos(tmp_path)), CPU, torch.float32)
    assert str(model.size) == "32x32x5"


def test_a_model_without_guidance_has_one_branch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 1 branches, not 2"):
        PublishedModel.made(str(tiny_pictures.flux2_dev(tmp_path)), CPU, torch.float32, PICTURE, 32, num_branches=2)


def answer_and_flops(model: PublishedModel) -> tuple[torch.Tensor, int]:
    """Return an answer, and the arithmetic of its linear layers, counted by hooks."""
    total = 0

    def count(layer: Any, _inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        total += 2 * layer.in_features * output.numel()

    layers = [part for part in model.module.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    answer = model.call()
    for hook in hooks:
        hook.remove()
    return answer, total
