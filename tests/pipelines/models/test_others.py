"""Krea 2, ERNIE-Image, Stable Diffusion 3 and the unknown Anima run on one rank, as jobs and on gangs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.core.packing import pack
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.krea2.spec import MAX_TOKENS
from pipelines.models.registry import load_spec
from pipelines.request import InputPicture, InputPictures
from pipelines.run import load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import (
    CASES,
    NEGATIVE,
    TOLERANCE,
    Case,
    denoised,
    encoded,
    request_of,
)
from tests.pipelines.support.checkpoints import tiny_others, tiny_unknown
from tests.pipelines.support.references.own_call import own_latents, own_state
from tests.pipelines.support.references.video import picture

NAMES = ("krea 2", "ernie", "sd 3", "sd 3.5 large")
"""Cases whose latents ``test_gangs.py`` compares."""
ALONE = {
    "krea 2 turbo": Case(make=tiny_others.krea2_turbo),
    "sd 3.5 medium": Case(make=tiny_others.sd35_medium, changes=NEGATIVE),
    "ernie without guidance": Case(make=tiny_others.ernie_image, changes={"true_cfg_scale": 1.0}),
    "anima": Case(make=tiny_unknown.anima, changes=NEGATIVE),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_gives_the_pipelines_own(name: str, folders: Callable[[Any], Path]) -> None:
    case = ALONE[name]
    folder = folders(case.make)
    request = request_of(case, folder)
    (latents,) = gang(1).run(denoised, folder, request, "ulysses", encoded(folder, request))
    assert relative_difference(latents, own_latents(folder, request)) <= TOLERANCE


def test_a_text_conditioner_is_the_encoders(folders: Callable[[Any], Path]) -> None:
    """Diffusers calls it in the blocks of ranks, which have no weights of it; with a picture, in another block."""
    folder = folders(tiny_unknown.anima)
    request = request_of(ALONE["anima"], folder)
    request = replace(request, num_pictures=1, strength=0.5, num_inference_steps=4)
    image, pipeline = picture(request.width, request.height, seed=7), load_pipeline(Checkpoint(folder))
    inputs = InputPictures(pictures=(InputPicture.of(image),))
    latents = pipeline.denoise(request, inputs)["latents"]
    own = own_state(folder, request, image=image, strength=0.5).get("latents")
    assert relative_difference(latents, own) <= TOLERANCE
    assert relative_difference(latents, pipeline.denoise(replace(request, prompt="a fox"), inputs)["latents"]) > 0.001


def test_blocks_that_attend_twice_are_not_divided(folders: Callable[[Any], Path]) -> None:
    case = ALONE["sd 3.5 medium"]
    folder = folders(case.make)
    with pytest.raises(RuntimeError, match="no plan to divide SD3Transformer2DModel over 2 ranks"):
        gang(2).run(denoised, folder, request_of(case, folder), "ulysses", b"")


@pytest.mark.parametrize("name", NAMES)
def test_frames_previews_and_a_job_that_moves(name: str, folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[name].make)
    request = request_of(CASES[name], folder)
    pipeline = load_pipeline(Checkpoint(folder))
    conditioning = pipeline.text_encoder.encode(request)
    pack(conditioning, torch.device("cpu"))
    *_, middle, last = pipeline.states(request)
    pack(middle, torch.device("cpu"))
    frames = pipeline.decoder.decode(pipeline.sampler.latents(last), request)
    preview = pipeline.decoder.preview(pipeline.sampler.preview(middle), request)
    for pixels in (frames, preview):
        assert pixels.dtype == np.uint8
        assert pixels.shape == (1, request.height, request.width, 3)
    moved, sampler = pickle.loads(pickle.dumps(middle)), Checkpoint(folder).sampler()
    finished = sampler.advance(moved, pipeline.engine.predict(sampler.branches(moved), (0,)))
    assert torch.equal(sampler.latents(finished)["latents"], pipeline.sampler.latents(last)["latents"])


def test_a_text_is_fused_once_a_job(folders: Callable[[Any], Path]) -> None:
    """It is fused once for each prompt. Its layers take 2 % of a step's blocks, on every rank of a gang."""
    folder, num_tokens, made = folders(CASES["krea 2"].make), list[int](), list[torch.Tensor]()
    checkpoint, request = Checkpoint(folder), request_of(CASES["krea 2"], folder)
    model = checkpoint.denoiser()
    fusion: Any = model.modules["transformer"].get_submodule("text_fusion")
    fusion.projector.register_forward_hook(lambda _module, args, _output: num_tokens.append(args[0].shape[1]))
    fusion.register_forward_hook(lambda _module, _args, output: made.append(output))
    load_pipeline(checkpoint, TorchEngine(model)).denoise(request)
    assert request.num_inference_steps > 1
    assert request.true_cfg_scale > 1
    assert len(num_tokens) == 2
    assert made[0].numel() * MAX_TOKENS == model.hoisted_numbers * num_tokens[0], "the planner's count"


@pytest.mark.parametrize("name", NAMES)
def test_a_known_step_checks_a_gang(name: str, folders: Callable[[Any], Path]) -> None:
    model = Checkpoint(folders(CASES[name].make)).denoiser()
    branches = model.probe()
    assert len(branches) == 2
    lengths = model.stream_lengths(branches[0].arguments)
    assert any(number % 4 for number in lengths.values())


@pytest.mark.parametrize(
    "class_name", ["ErnieImageTransformer2DModel", "Krea2Transformer2DModel", "SD3Transformer2DModel"]
)
def test_the_plan_covers_the_published_size(class_name: str) -> None:
    """The defaults of diffusers' class are the published model's. Stable Diffusion 3's are the medium's, except its 24
    layers."""
    import diffusers

    from engines.core.shard_plan import named_like

    with torch.device("meta"):
        module = getattr(diffusers, class_name)()
    plan = load_spec(class_name).shard_plan(module.config)
    for name in [shard.module for shard in plan.shards] + [gather.module for gather in plan.gathers]:
        assert named_like(module, name)
    names = [name for name, _ in module.named_modules()]
    assert all(any(rule.matches(name) for name in names) for rule in plan.linears)
    assert plan.blocks_of(module)
