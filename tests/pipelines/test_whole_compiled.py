"""Whole pipelines with compiled denoisers draw the eager call's picture, and compile nothing after the warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.models.generic.compiled_forwards import (
    INEXACT,
    CompiledForwards,
    blank_pictures,
    compiled_modules,
    trial_requests,
)
from pipelines.request import MediaRequest
from pipelines.size import Size
from pipelines.whole_pipeline import WholeEngine, parts_of
from tests.pipelines import test_whole_pipeline as whole
from tests.pipelines.support.checkpoints import tiny_whole

ROUNDING = 1e-4
"""Relative, in float32."""


class Spy:
    """A backend that compiles nothing and counts calls."""

    def __init__(self, fails: bool = False) -> None:
        self.num_compiled, self.num_runs, self._fails = 0, 0, fails

    def __call__(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_compiled += 1
        if self._fails:
            raise RuntimeError("no code for this processor")

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def tiny(checkpoint: Checkpoint) -> tuple[Size]:
    """Return the size of the tests' requests."""
    num_frames = whole.NUM_FRAMES if checkpoint.defaults.kind == "video" else None
    return (Size(width=whole.SIDE, height=whole.SIDE, num_frames=num_frames),)


def warm(checkpoint: Checkpoint, backend: Any = None) -> WholeEngine:
    """Return the engine of ``checkpoint`` after its warm-up."""
    if backend is None:
        engine = checkpoint.own_engine(compiled=True)
        assert engine is not None
    else:
        engine = WholeEngine(CompiledForwards(parts_of(checkpoint._whole), backend))
    for step in checkpoint.trial_steps(tiny(checkpoint)):
        engine.warm_up(step)
    return engine


def latents_of(checkpoint: Checkpoint, request: MediaRequest) -> Tensor:
    """Return the last latents of a job."""
    encoder, sampler, engine = checkpoint.text_encoder(), checkpoint.sampler(), WholeEngine()
    state = sampler.begin(request, encoder.encode(request, whole.pictures_of(request)))
    for _ in range(sampler.num_steps(state)):
        (latents,) = engine.predict(sampler.branches(state))
        state = sampler.advance(state, (latents,))
    return latents


def test_the_picture_is_that_of_the_eager_call(folders: Callable[[Any], Path]) -> None:
    """Inductor compiles it. A seed has the same bytes whatever request ran between."""
    folder = folders(tiny_whole.wan_over)
    compiled, eager = Checkpoint(folder), Checkpoint(folder)
    engine = warm(compiled)
    assert engine.forwards == "compiled"
    request = whole.request_of(compiled)
    made, exact = latents_of(compiled, request), latents_of(eager, request)
    assert 0 < relative_difference(made, exact) < ROUNDING
    latents_of(compiled, whole.request_of(compiled, prompt="a boat on the sea", true_cfg_scale=1.0))
    assert latents_of(compiled, request).equal(made)


def test_nothing_is_compiled_after_the_warm_up(folders: Callable[[Any], Path]) -> None:
    """Prompts of other lengths, other sizes and guidance run the compiled code."""
    checkpoint, spy = Checkpoint(folders(tiny_whole.chroma)), Spy()
    assert warm(checkpoint, spy).forwards == "compiled"
    num_compiled = spy.num_compiled
    assert num_compiled > 0
    for changes in ({}, {"prompt": "a boat that sails on"}, {"width": 96}, {"true_cfg_scale": 1.0}):
        num_runs = spy.num_runs
        latents_of(checkpoint, whole.request_of(checkpoint, **changes))
        assert spy.num_runs - num_runs >= whole.NUM_STEPS, changes
    assert spy.num_compiled == num_compiled


def test_a_failed_compilation_runs_eagerly_and_says_so(
    folders: Callable[[Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, spy = Checkpoint(folders(tiny_whole.chroma)), Spy(fails=True)
    with caplog.at_level(logging.ERROR):
        engine = warm(checkpoint, spy)
    assert engine.forwards == "eager"
    assert "cannot be compiled: the pipeline's forwards run eagerly" in caplog.text
    assert spy.num_compiled == 1, "it is not tried again"
    request = whole.request_of(checkpoint)
    own = Checkpoint(checkpoint.path)
    assert latents_of(checkpoint, request).equal(latents_of(own, request))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            raise ValueError("x has one dim")
        return 2 * x


def test_calls_of_another_form_run_as_they_are_written() -> None:
    spy, module = Spy(), Doubling()
    forwards = CompiledForwards({"transformer": module, "vae": Doubling()}, spy)  # type: ignore[arg-type]
    x = torch.arange(6.0).reshape(2, 3)
    assert module(x).equal(2 * x)
    assert (forwards.forwards, spy.num_compiled) == ("eager", 0)
    with forwards.warming():
        module(x)
    assert (forwards.forwards, spy.num_compiled, spy.num_runs) == ("compiled", 1, 1)
    for other in (x.reshape(3, 2), x.reshape(1, 2, 3), x.double()):
        assert module(other).equal(2 * other)
    assert (spy.num_compiled, spy.num_runs) == (1, 2), "only sizes may vary"


def test_an_error_of_the_module_itself_is_raised() -> None:
    module = Doubling()
    forwards = CompiledForwards({"transformer": module}, Spy())  # type: ignore[arg-type]
    with forwards.warming(), pytest.raises(ValueError, match="x has one dim"):
        module(torch.zeros(3))
    assert not forwards.error


def test_repeated_blocks_are_compiled_or_a_class_without_as_a_whole(folders: Callable[[Any], Path]) -> None:
    kinds = {
        make: [type(one).__name__ for one in compiled_modules(Checkpoint(folders(make))._whole.transformer)]
        for make in (tiny_whole.chroma, tiny_whole.aura_flow)
    }
    assert [*kinds.values()] == [
        ["ChromaTransformerBlock", "ChromaSingleTransformerBlock"],
        ["AuraFlowPatchEmbed", "AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"],
    ]
    assert [type(one) for one in compiled_modules(Doubling())] == [Doubling]


@pytest.mark.parametrize("make", [tiny_whole.chroma_over, tiny_whole.sdxl_controlled, tiny_whole.wan_over])
def test_the_warm_up_has_what_must_come_along(make: Any, folders: Callable[[Any], Path]) -> None:
    checkpoint = Checkpoint(folders(make))
    defaults = checkpoint.defaults
    guided, plain = trial_requests(defaults, tiny(checkpoint))
    assert guided.true_cfg_scale > 1 == plain.true_cfg_scale
    pictures = blank_pictures(guided)
    assert len(pictures.pictures) == defaults.min_pictures
    assert (pictures.control is not None) == defaults.needs_control
    assert (pictures.video is not None) == defaults.needs_video
    sizes = {(one.width, one.height) for one in (*pictures.pictures, pictures.control, pictures.video) if one}
    assert sizes == {(whole.SIDE, whole.SIDE)}
    assert np.asarray(pictures.pictures[0].image() if pictures.pictures else 128).mean() == 128


def test_a_class_whose_compiled_blocks_are_inexact_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    inexact = type(next(iter(INEXACT)), (nn.Linear,), {})(2, 2)
    forwards = CompiledForwards({"transformer": inexact, "vae": nn.Linear(2, 2)}, "eager")
    with forwards.warming():
        inexact(torch.ones(1, 2))
    assert forwards.forwards == "eager"
    assert "forward" not in vars(inexact)
    assert "run eagerly: on an H200" in caplog.text
