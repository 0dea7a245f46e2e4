"""Steps that reuse the last predictions equal a loop that computes every step, and diffusers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, TaylorSeerCacheConfig
from torch import Tensor

from engines.core.model import Branch
from engines.core.tensors import relative_difference
from pipelines.blocks.state import BlocksState
from pipelines.caching import CacheMode, computed_steps
from pipelines.checkpoint import Checkpoint
from pipelines.loading import ModelSource
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, PlainEngine, load_pipeline
from tests.pipelines.lora.support.tiny_lora import request_of
from tests.pipelines.support.checkpoints import tiny, tiny_models, tiny_qwen, tiny_whole
from tests.pipelines.support.references.picture_cases import PictureCase, pictures_of
from tests.pipelines.support.references.picture_cases import request_of as picture_request

NUM_STEPS = 10
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "flux": (tiny.flux, {"true_cfg_scale": 2.0}),
    "wan": (tiny.wan, {"true_cfg_scale": 3.0}),
    "flux2 klein": (tiny_models.flux2_klein, {}),
    "qwen": (tiny_models.qwen_image, {}),
    "z image": (tiny_models.z_image, {"true_cfg_scale": 3.0}),
}


class CountingEngine(PlainEngine):
    """Records the number of branches of each call."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(model=checkpoint.denoiser())
        object.__setattr__(self, "calls", [])

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> tuple[Tensor, ...]:
        self.calls.append(len(branches))  # type: ignore[attr-defined]
        return super().predict(branches, ranks)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: MODELS[name][0](tmp_path_factory.mktemp("model")))


def cached_request(name: str, folder: Path, mode: CacheMode) -> MediaRequest:
    changes = {"num_inference_steps": NUM_STEPS, "cache": mode, **MODELS[name][1]}
    return replace(request_of(folder), **changes)


def reference(pipeline: Pipeline, request: MediaRequest, computed: tuple[bool, ...]) -> Tensor:
    """Compute every forward, and discard those of steps that are not ``computed``."""
    sampler, state = pipeline.sampler, None
    state = sampler.begin(replace(request, cache="off"), pipeline.text_encoder.encode(request))
    last: tuple[Tensor, ...] = ()
    for is_computed in computed:
        predictions = pipeline.engine.predict(sampler.branches(state), (0,))
        last = tuple(x.clone() for x in predictions) if is_computed else last
        state = sampler.advance(state, tuple(x.clone() for x in last))
    latents: Tensor = sampler.latents(state)["latents"]
    return latents


@pytest.mark.parametrize(("name", "mode"), [*((name, "fast") for name in MODELS), ("flux", "conservative")])
def test_skipped_steps_take_what_the_step_before_predicted(
    name: str, mode: CacheMode, folders: Callable[[str], Path]
) -> None:
    checkpoint = Checkpoint(folders(name))
    engine = CountingEngine(checkpoint)
    pipeline = load_pipeline(checkpoint, engine)
    request, computed = cached_request(name, checkpoint.path, mode), computed_steps(mode, NUM_STEPS)
    latents = pipeline.denoise(request)["latents"]
    num_branches = engine.calls[0]  # type: ignore[attr-defined]
    assert engine.calls == [num_branches] * sum(computed)  # type: ignore[attr-defined]
    assert latents.equal(reference(pipeline, request, computed))
    if name == "flux":
        others = (*computed[:-2], not computed[-2], computed[-1])
        assert not latents.equal(reference(pipeline, request, others)), "another step changes the result"


@pytest.mark.parametrize(("begin", "end"), [(0.0, 0.45), (0.45, None)])
@pytest.mark.parametrize("make", [tiny_qwen.qwen_controlled, tiny_whole.sdxl_controlled])
def test_no_step_takes_a_prediction_that_was_made_with_another_control(
    make: Callable[[Path], Path], begin: float, end: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In diffusers' own blocks the weight in each call shows whether the control network works."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    checkpoint = checkpoint_with(make, tmp_path / "model")
    pipeline = load_pipeline(checkpoint)
    control = {"control_scale": 0.6, "control_guidance_start": begin, "control_guidance_end": end}
    case = PictureCase(make=make, pictures=(), has_control=True, num_steps=NUM_STEPS, changes=control)
    request = picture_request(case, checkpoint.path)
    plain = [weight_of(pipeline, state) for state in list(pipeline.states(request, pictures_of(case)))[:-1]]
    assert len(set(plain)) == 2
    cached = list(pipeline.states(replace(request, cache="fast"), pictures_of(case)))[:-1]
    made = [weight_of(pipeline, state) for state in cached]
    assert None in made, "some steps are skipped"
    last = None
    for step, weight in enumerate(made):
        last = last if weight is None else weight
        assert last == plain[step], step


def checkpoint_with(make: Callable[[Path], Path], folder: Path) -> Checkpoint:
    """Return a checkpoint with blocks: SDXL's classic pipeline with a network has none, so its network is apart."""
    make(folder)
    apart = str(ModelSource(base=str(folder / "sdxl"), network=str(folder / "controlnet")))
    return Checkpoint.open(apart) if (folder / "sdxl").exists() else Checkpoint(folder)


def weight_of(pipeline: Pipeline, state: BlocksState) -> float | None:
    """Return the control's weight in a step, or None without forwards."""
    branches = pipeline.sampler.branches(state)
    return float(branches[0].inputs["control.scale"]) if branches else None


def test_off_keeps_nothing_and_paints_what_it_did(folders: Callable[[str], Path]) -> None:
    pipeline = load_pipeline(Checkpoint(folders("flux")))
    request = cached_request("flux", folders("flux"), "off")
    states = list(pipeline.states(request))
    assert all(state.kept is None for state in states)
    assert pipeline.sampler.latents(states[-1])["latents"].equal(reference(pipeline, request, (True,) * NUM_STEPS))


def test_nothing_is_kept_that_no_step_takes(folders: Callable[[str], Path]) -> None:
    pipeline = load_pipeline(Checkpoint(folders("flux")))
    states = list(pipeline.states(cached_request("flux", folders("flux"), "conservative")))
    computed = (*computed_steps("conservative", NUM_STEPS), True)
    assert [state.kept is None for state in states] == list(computed)


def test_a_state_with_something_kept_travels(folders: Callable[[str], Path]) -> None:
    pipeline = load_pipeline(Checkpoint(folders("wan")))
    request = cached_request("wan", folders("wan"), "fast")
    *_, latents = (pipeline.sampler.latents(state)["latents"] for state in pipeline.states(request))
    state = next(state for state in pipeline.states(request) if state.kept is not None)
    state = pickle.loads(pickle.dumps(state))
    while state.step < NUM_STEPS:
        branches = pipeline.sampler.branches(state)
        state = pipeline.sampler.advance(state, pipeline.engine.predict(branches, (0,)) if branches else ())
    assert pipeline.sampler.latents(state)["latents"].equal(latents)


def test_another_transformer_does_not_take_the_predictions_of_the_first(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tiny.wan(tmp_path, boundary_ratio=0.8))
    engine = CountingEngine(checkpoint)
    pipeline = load_pipeline(checkpoint, engine)
    request = cached_request("wan", tmp_path, "fast")
    off = list(pipeline.states(replace(request, cache="off")))
    modules = [pipeline.sampler.branches(state)[0].module for state in off[:-1]]
    change, computed = modules.index("transformer_2"), computed_steps("fast", NUM_STEPS)
    assert not computed[change], "this schedule would skip the first step of the second transformer"
    engine.calls.clear()  # type: ignore[attr-defined]
    latents = pipeline.denoise(request)["latents"]
    computed = (*computed[:change], True, *computed[change + 1 :])
    assert len(engine.calls) == sum(computed)  # type: ignore[attr-defined]
    assert latents.equal(reference(pipeline, request, computed))


def test_too_few_steps_are_refused(folders: Callable[[str], Path]) -> None:
    pipeline = load_pipeline(Checkpoint(folders("flux")))
    request = replace(cached_request("flux", folders("flux"), "fast"), num_inference_steps=4)
    with pytest.raises(ValueError, match="num_inference_steps is 4"):
        pipeline.denoise(request)


def test_it_equals_diffusers_own_hook_of_order_0(folders: Callable[[str], Path]) -> None:
    """TaylorSeer's lite form caches the last layer's output; its pattern can match the conservative one."""
    request = replace(cached_request("flux", folders("flux"), "conservative"), true_cfg_scale=1.0)
    computed = computed_steps("conservative", NUM_STEPS)
    pipeline = FluxPipeline.from_pretrained(folders("flux"))
    pipeline.set_progress_bar_config(disable=True)
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    pipeline.transformer.transformer_blocks[0].attn.register_forward_hook(count)
    pipeline.transformer.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=computed.index(False),
            disable_cache_after_step=NUM_STEPS - 1,
            max_order=0,
            taylor_factors_dtype=torch.float32,
            use_lite_mode=True,
        )
    )
    ours = load_pipeline(Checkpoint(folders("flux")))
    expected = pipeline(
        request.prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=NUM_STEPS,
        guidance_scale=request.guidance_scale,
        max_sequence_length=ours.text_encoder.max_tokens,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).images
    expected = pipeline._unpack_latents(expected, request.height, request.width, pipeline.vae_scale_factor)
    assert num_calls == sum(computed)
    assert relative_difference(ours.denoise(request)["latents"], expected) <= 1e-5
    assert relative_difference(ours.denoise(replace(request, cache="off"))["latents"], expected) > 1e-3
