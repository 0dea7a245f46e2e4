"""LTX-2 in two passes as one job, on gangs of Gloo ranks, equals the calls of diffusers' users."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import LTX2LatentUpsamplePipeline, LTX2ModularPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import STAGE_2_DISTILLED_SIGMA_VALUES
from PIL import Image
from torch import Tensor

from engines.core.packing import pack
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.lora.source import LoraSource
from pipelines.request import Lora, MediaRequest, SecondStage
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.tiny_lora import write_lora
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.support.references.own_call import silence
from tests.pipelines.support.references.video import picture, pictures_of

SIDES = (128, 192)
"""Sides of the second pass, which has 72 tokens; the first has half of them and 18 tokens."""
SECOND = SecondStage(scale=2.0, sigmas=tuple(STAGE_2_DISTILLED_SIGMA_VALUES))
ADAPTER = "distilled"
REFINED = replace(SECOND, loras=(Lora(name=ADAPTER, scale=0.8),))
NO_GUIDANCE: dict[str, float] = {
    **{f"{kind}{scale}": 1.0 for kind in ("", "audio_") for scale in ("guidance_scale", "modality_scale")},
    **{f"{kind}{scale}": 0.0 for kind in ("", "audio_") for scale in ("stg_scale", "guidance_rescale")},
}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_ltx.ltx2_two_stages)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(folder, tmp_path_factory.mktemp("adapter") / ADAPTER, 3)


def request_of(folder: Path, **changes: Any) -> MediaRequest:
    height, width = SIDES
    words = {"prompt": "a red circle", "negative_prompt": "blue", "true_cfg_scale": 1.0}
    more = {"num_inference_steps": 2, "seed": 5, "second_stage": SECOND, **words, **changes}
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=5), **more)


@cache
def by_two_calls(folder: Path, request: MediaRequest, adapter: Path | None = None) -> Mapping[str, Tensor]:
    """Return the clip's tokens and the sound of the classic pipelines, as diffusers' documents call them."""
    pipe = LTX2Pipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.tokenizer.padding_side = "left"  # Gemma's side
    pipe.set_progress_bar_config(disable=True)
    call: Any = {
        "prompt": request.prompt,
        "num_frames": request.num_frames,
        "frame_rate": request.fps,
        "generator": torch.Generator().manual_seed(request.seed),
        "max_sequence_length": pipe.tokenizer.model_max_length,
        "output_type": "latent",
        "return_dict": False,
        **NO_GUIDANCE,
    }
    sides = {"width": request.width // 2, "height": request.height // 2}
    video, audio = pipe(**call, **sides, num_inference_steps=request.num_inference_steps)
    video = enlarged(folder, pipe.vae, video)
    if adapter is not None:
        pipe.load_lora_weights(str(adapter), adapter_name=ADAPTER)
        pipe.set_adapters(ADAPTER, request.second_stage.loras[0].scale)  # type: ignore[union-attr]
    pipe.scheduler = static(pipe.scheduler)
    sigmas = list(SECOND.sigmas)
    sides = {"width": request.width, "height": request.height}
    video, audio = pipe(
        **call, **sides, latents=video, audio_latents=audio, noise_scale=sigmas[0], sigmas=sigmas, num_inference_steps=3
    )
    return {"video": video, "audio": audio}


def enlarged(folder: Path, vae: Any, video: Tensor) -> Tensor:
    model = LTX2LatentUpsamplerModel.from_pretrained(folder, subfolder="latent_upsampler")
    upsample = LTX2LatentUpsamplePipeline(vae=vae, latent_upsampler=model)
    made: Tensor = upsample(latents=video, output_type="latent", return_dict=False)[0]
    return made


def static(scheduler: Any) -> Any:
    """Return the scheduler that leaves sigmas unchanged."""
    return diffusers.FlowMatchEulerDiscreteScheduler.from_config(
        scheduler.config, use_dynamic_shifting=False, shift_terminal=None
    )


def by_blocks(folder: Path, request: MediaRequest, images: tuple[Image.Image, ...]) -> Mapping[str, Tensor]:
    """Return the same from two calls of the modular pipeline, whose guiders have a scale each."""
    pipe = LTX2ModularPipeline(pretrained_model_name_or_path=str(folder))
    pipe.load_components(dtype=torch.float32)
    for block in pipe.blocks.sub_blocks.values():
        silence(block)
    call: Any = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "num_frames": request.num_frames,
        "frame_rate": request.fps,
        "generator": torch.Generator().manual_seed(request.seed),
        "max_sequence_length": pipe.tokenizer.model_max_length,
        "output_type": "latent",
    }
    small, large = ({"image": cut(images[0], request, scale)} if images else {} for scale in (2, 1))
    pipe.guider.guidance_scale = request.true_cfg_scale
    if request.true_cfg_scale <= 1:
        pipe.guider.disable()
        pipe.audio_guider.disable()
    sides = {"width": request.width // 2, "height": request.height // 2}
    first = pipe(**call, **small, **sides, num_inference_steps=request.num_inference_steps)
    pipe.guider.disable()
    pipe.audio_guider.disable()
    pipe.update_components(scheduler=static(pipe.scheduler))
    begin = {"latents": enlarged(folder, pipe.vae, first.get("videos")), "audio_latents": first.get("audio")}
    sigmas = list(SECOND.sigmas)
    sides = {"width": request.width, "height": request.height}
    last = pipe(**call, **large, **sides, **begin, noise_scale=sigmas[0], sigmas=sigmas, num_inference_steps=3)
    return {"video": last.get("videos"), "audio": last.get("audio")}


def cut(image: Image.Image, request: MediaRequest, divisor: int) -> Image.Image:
    """Return the picture in the size of a pass: diffusers compresses it before it resizes it."""
    return image.resize((request.width // divisor, request.height // divisor), Image.Resampling.LANCZOS)


def denoised(
    folder: Path,
    request: MediaRequest,
    conditioning: bytes,
    strategy: str,
    sources: tuple[LoraSource, ...] = (),
    moves: bool = False,
) -> dict[str, Any]:
    """Return the decoder's inputs from a gang's rank. With ``moves``, the state is sent before each step."""
    checkpoint, ranks = Checkpoint(folder, loras=sources), tuple(range(dist.get_world_size()))
    engine, sampler = TorchEngine(checkpoint.denoiser(), strategy=strategy), checkpoint.sampler()
    state = sampler.begin(request, pickle.loads(conditioning))
    for _ in range(sampler.num_steps(state)):
        if moves:
            pack(state, engine.device)
            state = pickle.loads(pickle.dumps(state))
        state = sampler.advance(state, engine.predict(sampler.branches(state), ranks))
    engine.close()
    return dict(sampler.latents(state))


def encoded(folder: Path, request: MediaRequest, images: tuple[Image.Image, ...] = ()) -> bytes:
    return pickle.dumps(Checkpoint(folder).text_encoder().encode(request, pictures_of(images)))


def normal(folder: Path, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return diffusers' finished latents in the decoder's form: tokens, normalised by the auto-encoders' statistics."""
    vae, audio_vae = (diffusers.AutoModel.from_pretrained(str(folder / part)) for part in ("vae", "audio_vae"))
    mean, std = (getattr(vae, name).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    sound = made["audio"].transpose(1, 2).flatten(2)
    return {
        "latents": ((made["video"] - mean) / std).flatten(2).mT,
        "audio_latents": (sound - audio_vae.latents_mean) / audio_vae.latents_std,
    }


def check(folder: Path, values: Mapping[str, Any], made: Mapping[str, Tensor]) -> None:
    for name, expected in normal(folder, made).items():
        assert expected.std() > 0.1
        tokens = values[name][:, : expected.shape[1]]
        assert relative_difference(tokens, expected) <= TOLERANCE, name


STRATEGIES = {1: ("ulysses",), 2: ("ulysses", "ring", "tensor"), 4: ("ulysses", "hybrid")}


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_both_passes_equal_two_calls_of_the_classic_pipeline(num_ranks: int, folder: Path) -> None:
    request = request_of(folder)
    conditioning = encoded(folder, request)
    for strategy in STRATEGIES[num_ranks]:
        ranks = gang(num_ranks).run(denoised, folder, request, conditioning, strategy, (), strategy == "ulysses")
        for values in ranks:
            check(folder, values, by_two_calls(folder, request))
            assert torch.equal(values["latents"], ranks[0]["latents"])


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_second_pass_has_its_own_adapters(num_ranks: int, folder: Path, adapter: Path) -> None:
    request = request_of(folder, second_stage=REFINED)
    sources = (LoraSource(path=str(adapter), name=ADAPTER),)
    expected = by_two_calls(folder, request, adapter)
    assert relative_difference(expected["video"], by_two_calls(folder, request_of(folder))["video"]) > 0.01
    for values in gang(num_ranks).run(denoised, folder, request, encoded(folder, request), "ulysses", sources):
        check(folder, values, expected)


BY_BLOCKS = {"guided": (0, 3.0), "a picture begins": (1, 1.0)}


def by_blocks_case(name: str, folder: Path) -> tuple[MediaRequest, tuple[Image.Image, ...]]:
    num_pictures, scale = BY_BLOCKS[name]
    images = tuple(picture(SIDES[1], SIDES[0], seed) for seed in range(num_pictures))
    return request_of(folder, true_cfg_scale=scale, num_pictures=num_pictures), images


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_both_passes_equal_two_calls_of_the_blocks(name: str, num_ranks: int, folder: Path) -> None:
    """The picture is encoded in the size of each pass."""
    request, images = by_blocks_case(name, folder)
    conditioning = encoded(folder, request, images)
    for values in gang(num_ranks).run(denoised, folder, request, conditioning, "ulysses"):
        check(folder, values, by_blocks(folder, request, images))


def test_pictures_at_frames_stay_in_both_passes(folder: Path) -> None:
    request = request_of(folder, num_pictures=2)
    pipeline = load_pipeline(Checkpoint(folder))
    images = tuple(picture(SIDES[1], SIDES[0], seed) for seed in (1, 2))
    states = list(pipeline.states(request, pictures_of(images)))
    num_tokens = [state.loop_state.latents.shape[1] for state in states]
    assert num_tokens == [18 + 6] * 2 + [72 + 24] * 4
    frames = pipeline.decoder.decode(pipeline.sampler.latents(states[-1]), request)
    assert frames.shape == (5, *SIDES, 3)


def test_previews_have_the_size_of_their_pass_and_no_noise_between_both(folder: Path) -> None:
    pipeline, request = load_pipeline(Checkpoint(folder)), request_of(folder)
    states = list(pipeline.states(request))
    previews = [pipeline.sampler.preview(state) for state in states]
    shapes = [pipeline.decoder.preview(one, request).shape for one in previews]
    height, width = SIDES
    assert shapes == [(1, height // 2, width // 2, 3)] * 2 + [(1, height, width, 3)] * 4
    first = pipeline.denoise(request.stages[0])
    made = pipeline.sampler.latent_upsampler(first)
    assert torch.equal(previews[2]["latents"], made.latents["latents"])
    assert torch.equal(previews[2]["audio_latents"], first["audio_latents"])


def test_adapters_of_the_first_pass_are_blamed_for_what_it_made(folder: Path) -> None:
    """The second pass has other adapters."""
    pipeline, request = load_pipeline(Checkpoint(folder)), request_of(folder)
    state = list(pipeline.states(request))[1]
    predictions = pipeline.engine.predict(pipeline.sampler.branches(state), (0,))
    broken = tuple(torch.full_like(one, math.nan) for one in predictions)
    state = replace(state, request=replace(state.request, loras=(Lora(name="ink"),)))
    with pytest.raises(ValueError, match=r"the latents of this request are not finite .* with the adapters ink"):
        pipeline.sampler.advance(state, broken)


def test_a_gang_knows_the_steps_of_both_passes(folder: Path) -> None:
    checkpoint, request = Checkpoint(folder), request_of(folder, true_cfg_scale=3.0)
    assert checkpoint.num_steps(request) == 2 + 3
    sampler = checkpoint.sampler()
    state = sampler.begin(request, checkpoint.text_encoder().encode(request))
    first, last = sampler.kinds(state)
    assert [branch.inputs["hidden_states"].shape[1] for branch in (first[0], last[0])] == [18, 72]
    assert len(first) > len(last) == 1
    (largest,) = checkpoint.largest_step(request)
    assert largest.inputs["hidden_states"].shape[1] == 72
    assert checkpoint.first_latents(request)["latents"].shape[1] == 72


def test_a_gang_warms_up_for_both_passes(folder: Path) -> None:
    """The second pass has the sizes that results may have: 96 is no multiple of 64."""
    checkpoint = Checkpoint(folder)
    sizes = [Size(width=width, height=128, num_frames=5) for width in (96, 192)]
    plain, staged = (
        [step[0].inputs["hidden_states"].shape[1] for step in checkpoint.first_steps(sizes, ["a"], second_stage=one)]
        for one in (None, SECOND)
    )
    assert plain == [36, 72]
    assert staged == [36, 72, 72]
    *_, last = checkpoint.first_steps(sizes, ["a"], second_stage=SECOND)
    assert len(last) == 1, "without guidance"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"second_stage": replace(SECOND, scale=1.5)}, "the sides grow by 1.5 between both passes"),
        ({"second_stage": replace(SECOND, sigmas=(0.5, 0.7))}, "it must fall from at most 1"),
        ({"second_stage": replace(SECOND, sigmas=(0.5, 0.0))}, "to a last value above 0"),
        ({"num_frames": 1}, "num_frames is 1, and a second pass is for clips"),
    ],
)
def test_passes_that_cannot_be_are_refused(changes: Any, told: str, folder: Path) -> None:
    request = replace(request_of(folder), **changes)
    with pytest.raises(ValueError, match=told):
        Checkpoint(folder).defaults.check(request)


def test_sizes_are_multiples_of_both_passes(folder: Path, folders: Callable[[Any], Path]) -> None:
    with pytest.raises(ValueError, match="positive multiples of 64, such as 256x128"):
        Checkpoint(folder).defaults.request(Size(width=224, height=128, num_frames=5), second_stage=SECOND)
    with pytest.raises(ValueError, match="need a model with a latent upsampler, and this one has none"):
        request_of(folders(tiny_ltx.ltx2_few_layers))


@pytest.mark.parametrize("change", [{"temporal_upsample": True}, {"rational_spatial_scale": 0.75}])
def test_an_upsampler_that_does_something_else_is_refused(change: Any, folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    file = copied / "latent_upsampler" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="does not enlarge the sides alone"):
        _ = Checkpoint(copied).defaults
