"""Cosmos 3 on gangs of Gloo ranks, with every strategy of its plan, equals diffusers' own call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import Cosmos3OmniTransformer
from torch import Tensor, nn

from engines.core.packing import pack
from engines.core.shard_plan import named_like
from engines.parallel.division import may_pair
from engines.parallel.tensor import matching, split_features
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.cosmos import attention
from pipelines.models.registry import load_spec
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.models.test_video import largest_difference, without_exchange
from tests.pipelines.support.checkpoints import tiny_cosmos
from tests.pipelines.support.references import own_clips as own_clips
from tests.pipelines.support.references.video import Clip, Latents, denoised_from, encoded, picture, pictures_of

ALONE = {"true_cfg_scale": 1.0}
STRATEGIES = {
    2: (*CONTEXT, "tensor", "guidance", "auto"),
    4: (*CONTEXT, "hybrid", "guidance2xulysses2", "tensor2xulysses2"),
}


def clip(make: Callable[[Path], Path], **more: Any) -> Clip:
    """Return a clip of three latent frames: 18 tokens, which 4 ranks must pad."""
    return Clip(make=make, reference=own_clips.guided_blocks, **{"num_latent_frames": 3, **more})


CLIPS = {
    "from words": clip(tiny_cosmos.cosmos),
    "from a picture": clip(tiny_cosmos.cosmos, num_pictures=1),
    "from a clip": clip(tiny_cosmos.cosmos, num_video_frames=7, sides=(2, 6)),  # blocks resize to multiples of 16
    "with sound": clip(tiny_cosmos.cosmos_with_sound),
    "with sound from a picture": clip(tiny_cosmos.cosmos_with_sound, num_pictures=1, changes=ALONE),
    "with sound from a clip": clip(tiny_cosmos.cosmos_with_sound, num_video_frames=7, sides=(2, 6), changes=ALONE),
    "no sound where it could": clip(tiny_cosmos.cosmos_with_sound, changes={"sound": False}),
    "one frame": clip(tiny_cosmos.cosmos_with_sound, num_latent_frames=1, changes=ALONE),
    "the edge's layers": clip(tiny_cosmos.cosmos_edge),
    "distilled": clip(tiny_cosmos.cosmos_distilled),
}


@pytest.fixture(scope="module")
def expected(folders: Callable[[Any], Path]) -> Callable[[str], Latents]:
    return cache(lambda name: CLIPS[name].own(folders(CLIPS[name].make)))


@pytest.fixture(scope="module")
def loaded(folders: Callable[[Any], Path]) -> Callable[[str], tuple[MediaRequest, Pipeline]]:
    pipeline = cache(lambda folder: load_pipeline(Checkpoint(folder)))

    def of(name: str) -> tuple[MediaRequest, Pipeline]:
        folder = folders(CLIPS[name].make)
        return CLIPS[name].request(folder), pipeline(folder)

    return of


@pytest.mark.parametrize("name", CLIPS)
def test_one_rank_gives_the_very_bits_of_diffusers(
    name: str, loaded: Callable[[str], Any], expected: Callable[[str], Latents]
) -> None:
    request, pipeline = loaded(name)
    latents = pipeline.denoise(request, pictures_of(CLIPS[name].images(request)))
    assert all(value.std() > 0.1 for value in expected(name).values())
    for key, value in expected(name).items():
        if key.endswith("latents"):
            assert torch.equal(latents[key], value), key
    assert ("sound_latents" in latents) == name.startswith("with sound")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", STRATEGIES)
@pytest.mark.parametrize("name", CLIPS)
def test_latents_equal_diffusers(
    name: str, num_ranks: int, folders: Callable[[Any], Path], expected: Callable[[str], Latents]
) -> None:
    folder = folders(CLIPS[name].make)
    request = CLIPS[name].request(folder)
    images = CLIPS[name].images(request)
    for strategy in STRATEGIES[num_ranks]:
        for latents in gang(num_ranks).run(
            denoised_from, folder, request, encoded(folder, request, pictures_of(images)), strategy
        ):
            assert largest_difference(latents, expected(name)) <= TOLERANCE, strategy


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_without_the_exchange_they_do_not(
    name: str, folders: Callable[[Any], Path], expected: Callable[[str], Latents]
) -> None:
    folder = folders(CLIPS[name].make)
    request = CLIPS[name].request(folder)
    conditioning = encoded(folder, request, pictures_of(CLIPS[name].images(request)))
    for latents in gang(2).run(without_exchange, folder, request, conditioning):
        assert largest_difference(latents, expected(name)) > 10 * TOLERANCE


def test_both_branches_may_run_at_once(loaded: Callable[[str], Any]) -> None:
    """One prompt is longer than the other."""
    request, pipeline = loaded("from words")
    one, other = pipeline.sampler.branches(pipeline.sampler.begin(request, pipeline.text_encoder.encode(request)))
    assert one.inputs["input_ids"].shape != other.inputs["input_ids"].shape
    assert may_pair(one, other, load_spec("Cosmos3OmniTransformer").shard_plan({"hidden_act": "silu", "head_dim": 16}))


def test_the_text_is_computed_once_a_job(folders: Callable[[Any], Path]) -> None:
    """It is computed for the prompt and the negative prompt, whatever the number of steps."""
    folder, num_tokens = folders(tiny_cosmos.cosmos), []
    checkpoint = Checkpoint(folder)
    model = checkpoint.denoiser()
    embedding: Any = model.modules["transformer"].get_submodule("embed_tokens")
    embedding.register_forward_hook(lambda _module, args, _output: num_tokens.append(len(args[0])))
    pipeline = load_pipeline(checkpoint, TorchEngine(model))
    for num_steps in (3, 5):
        num_tokens.clear()
        pipeline.denoise(replace(CLIPS["from words"].request(folder), num_inference_steps=num_steps))
        assert len([number for number in num_tokens if number]) == 2


def test_the_timestep_of_many_tokens_is_embedded_for_a_few(
    folders: Callable[[Any], Path], expected: Callable[[str], Latents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of the clip and its sound share it, whatever their number."""
    monkeypatch.setattr(attention, "FEW", 2)
    name, num_rows = "with sound from a picture", list[int]()
    folder = folders(CLIPS[name].make)
    checkpoint = Checkpoint(folder)
    model = checkpoint.denoiser()
    layer: Any = model.modules["transformer"].get_submodule("time_embedder.linear_1")
    layer.register_forward_hook(lambda _module, args, _output: num_rows.append(len(args[0])))
    images = pictures_of(CLIPS[name].images(CLIPS[name].request(folder)))
    latents = load_pipeline(checkpoint, TorchEngine(model)).denoise(CLIPS[name].request(folder), images)
    assert set(num_rows) == {2}
    assert largest_difference(latents, expected(name)) <= TOLERANCE


@pytest.mark.parametrize("name", ["from a picture", "with sound"])
def test_a_job_moves_between_ranks(name: str, loaded: Callable[[str], Any]) -> None:
    request, pipeline = loaded(name)
    conditioning = pipeline.text_encoder.encode(request, pictures_of(CLIPS[name].images(request)))
    state = pipeline.sampler.begin(request, pickle.loads(pickle.dumps(conditioning)))
    pack((conditioning, state), torch.device("cpu"))
    moved = pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
    moved = pickle.loads(pickle.dumps(moved))
    for key, value in finish(pipeline, state).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, finish(pipeline, moved)[key]), key


def finish(pipeline: Pipeline, state: Any) -> Latents:
    for _ in range(state.step, pipeline.sampler.num_steps(state)):
        state = pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
    return pipeline.sampler.latents(state)


@pytest.mark.parametrize("name", CLIPS)
def test_frames_and_sound_are_those_of_diffusers(
    name: str, loaded: Callable[[str], Any], expected: Callable[[str], Latents]
) -> None:
    request, pipeline = loaded(name)
    *_, before, state = pipeline.states(request, pictures_of(CLIPS[name].images(request)))
    media = pipeline.decoder.decode_all(pipeline.sampler.latents(state), request)
    videos_FCHW = expected(name)["videos"]
    assert media.frames_FHWC.shape == (request.num_frames, request.height, request.width, 3)
    assert np.abs(media.frames_FHWC / 255 - videos_FCHW.permute(0, 2, 3, 1).numpy()).max() <= 0.51 / 255
    assert (media.sound is not None) == name.startswith("with sound")
    if media.sound is not None:
        assert np.array_equal(media.sound.samples_CT, expected(name)["sound"].numpy())
        assert media.sound.rate == tiny_cosmos.RATE
    preview = pipeline.decoder.preview(pipeline.sampler.preview(before), request)
    assert preview.shape == (1, request.height, request.width, 3)


def test_pictures_matter(loaded: Callable[[str], Any]) -> None:
    request, pipeline = loaded("from a picture")
    one, other = (
        pipeline.denoise(request, pictures_of((picture(request.width, request.height, seed),)))["latents"]
        for seed in (0, 7)
    )
    assert (one - other).norm() > 0.01 * other.norm()


def test_distilled_models_have_a_schedule_of_their_own(folders: Callable[[Any], Path]) -> None:
    with pytest.raises(ValueError, match="num_inference_steps is 3; it must be 2"):
        Checkpoint(folders(tiny_cosmos.cosmos_distilled)).defaults.check_num_steps(3)


@pytest.mark.parametrize("name", ["from words", "with sound from a picture", "distilled"])
def test_a_gang_prepares_with_blank_values(name: str, loaded: Callable[[str], Any]) -> None:
    """Steps with blank values have the shapes of real ones, except the length of the prompt."""
    request, pipeline = loaded(name)
    checkpoint = Checkpoint(pipeline.sampler._opened.path)
    pictures = pictures_of(CLIPS[name].images(request))
    real = pipeline.sampler.branches(pipeline.sampler.begin(request, pipeline.text_encoder.encode(request, pictures)))
    blank = checkpoint.first_step(request)
    assert len(blank) == len(real)
    assert blank[0].constants == real[0].constants
    for key in ("hidden_states", "timestep", "noisy_frames"):
        assert blank[0].inputs[key].shape == real[0].inputs[key].shape
    model = checkpoint.denoiser()
    probe = model.probe()
    assert len(probe) == 2
    (made,) = attention.hoisted_text(model.modules["transformer"], probe[0].inputs).values()
    num_text = model.stream_lengths(probe[0].arguments)["text"]
    assert made.numel() == model.hoisted_features["text"] * num_text, "the planner's count"
    assert all(prediction.isfinite().all() for prediction in pipeline.engine.predict(probe, (0,)))


@pytest.mark.parametrize("name", ["from words", "with sound", "one frame"])
def test_a_decoder_prepares_with_latents_of_no_step(name: str, loaded: Callable[[str], Any]) -> None:
    """Values that only steps make, and decoding does not read, are missing."""
    request, pipeline = loaded(name)
    latents = Checkpoint(pipeline.sampler._opened.path).first_latents(request)
    assert pipeline.decoder.decode_all(latents, request).frames_FHWC.shape[0] == request.num_frames
    assert pipeline.decoder.preview(latents, request).shape == (1, request.height, request.width, 3)


def test_the_guardrail_is_asked_unless_the_folder_says_no(tmp_path: Path) -> None:
    folder = tiny_cosmos.cosmos(tmp_path)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"enable_safety_checker": false', '"enable_safety_checker": true'))
    with pytest.raises(ValueError, match="pip install cosmos_guardrail"):
        Checkpoint(folder).text_encoder()
    with patch("diffusers.modular_pipelines.cosmos.modular_pipeline.CosmosSafetyChecker", RefusingGuardrail):
        encoder = Checkpoint(folder).text_encoder()
        with pytest.raises(ValueError, match="unsafe text"):
            encoder.encode(CLIPS["from words"].request(folder))


class RefusingGuardrail(SimpleNamespace):
    """Stands for the guardrail."""

    def to(self, device: torch.device | str) -> RefusingGuardrail:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return False


def test_the_plan_fits_the_published_model() -> None:
    """The defaults of diffusers' class are the sizes of Cosmos 3 Nano."""
    with torch.device("meta"):
        transformer = Cosmos3OmniTransformer()
    plan = load_spec("Cosmos3OmniTransformer").shard_plan(transformer.config)
    assert sum(weight.numel() for weight in transformer.parameters()) == 15_156_222_144
    features = split_features(transformer, plan)
    assert all(number % 8 == 0 for number in features.values())
    assert features["layers.*.self_attn.to_k"] == 8, "heads"
    linears = {name for name, part in transformer.layers.named_modules(prefix="layers") if type(part) is nn.Linear}
    assert {name for rule in plan.linears for name in matching(transformer, rule)} == linears
    for shard in plan.shards:
        assert named_like(transformer, shard.module)
