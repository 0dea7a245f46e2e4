"""Wan Animate 2 on gangs of Gloo ranks equals diffusers' pipeline as users call it: its loop over segments."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers.modular_pipelines.wan_animate_2 import denoise
from PIL import Image
from torch import Tensor

from engines.core.packing import pack
from engines.core.spec import ParallelSpec
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.parallel.mesh import team_of_one
from engines.planner.profile import profile
from engines.tensorrt_engine.export.trace import offline_team
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions
from pipelines.checkpoint import Checkpoint
from pipelines.models.wan_animate2 import attention, patches
from pipelines.models.wan_animate2.attention import KEYS_VALUES
from pipelines.models.wan_animate2.call import NEGATIVE, SKIPPED_BLOCK
from pipelines.models.wan_animate2.patches import last_frames
from pipelines.request import InputPicture, InputPictures, InputVideo, MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints import tiny_animate
from tests.pipelines.support.full_size import Recorded, first_step, model_on_gpu, trace
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.video import denoised_from, encoded, frames, picture

ALL = (*CONTEXT, "hybrid", "guidance")


@dataclass(frozen=True)
class Case:
    """``sides`` are height and width in pixels; a place is 16 x 16 of them."""

    sides: tuple[int, int]
    num_frames: int
    kind: Callable[[Path], Path] = tiny_animate.wan_animate2
    words: dict[str, Any] = field(default_factory=lambda: {"negative_prompt": "blue"})


CASES = {
    "chunks begin amid a place": Case((48, 80), 9),
    "the last chunk is filled up": Case((48, 80), 5),
    "chunks are whole places": Case((64, 64), 5),
    "distilled": Case((48, 80), 9, tiny_animate.wan_animate2_distilled, {}),
    "two segments": Case((48, 80), 17, tiny_animate.wan_animate2_segments),
    "three segments, distilled": Case((48, 80), 21, tiny_animate.wan_animate2_distilled_segments, {}),
}
"""15 places of 4 latent frames, 15 of 3, and 16 of 3; the picture's frame is included. Segments have 15 places of 4.
The clip of three has a segment of 9 frames, 8 more in another, and 4 in a padded one."""
SOME, TWO, THREE = "chunks begin amid a place", "two segments", "three segments, distilled"
QUICK = {
    (SOME, 1, "ulysses"),
    (SOME, 2, "guidance"),
    (SOME, 4, "ring"),
    ("the last chunk is filled up", 2, "ulysses"),
    ("chunks are whole places", 4, "allgather_kv"),
    ("distilled", 1, "ulysses"),
    (TWO, 2, "ulysses"),
    (THREE, 1, "ulysses"),
}
GANGS = [
    pytest.param(name, num_ranks, strategy, marks=() if (name, num_ranks, strategy) in QUICK else pytest.mark.slow)
    for name in CASES
    for num_ranks in (1, 2, 4)
    for strategy in (ALL if num_ranks == 4 else (*CONTEXT, "guidance") if num_ranks == 2 else ("ulysses",))
]


def request_of(name: str, folder: Path, **changes: Any) -> MediaRequest:
    (height, width), num_frames = CASES[name].sides, CASES[name].num_frames
    along = {"num_pictures": 1, "num_video_frames": num_frames}
    more = {"prompt": "a red circle", "num_inference_steps": 2, "seed": 5, **CASES[name].words, **along, **changes}
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=num_frames), **more)


def inputs_of(request: MediaRequest, *, character: int = 3, is_backwards: bool = False) -> InputPictures:
    shown = driving_of(request)[:: -1 if is_backwards else 1]
    data = b"".join(frame.tobytes() for frame in shown)
    video = InputVideo(width=request.width, height=request.height, num_frames=request.num_frames, fps=24, data=data)
    return InputPictures(pictures=(InputPicture.of(character_of(request, character)),), video=video)


def character_of(request: MediaRequest, seed: int = 3) -> Image.Image:
    return picture(request.width, request.height, seed)


def driving_of(request: MediaRequest) -> list[Image.Image]:
    return list(frames(request.width, request.height, request.num_frames))


@dataclass(frozen=True)
class Made:
    latents: Tensor
    """Latents without the picture's frames; several segments are concatenated."""
    pixels_FCHW: Tensor


def latents_of(values: Mapping[str, Any]) -> Tensor:
    """Return the same from the decoder's inputs."""
    return torch.cat([segment[:, 1:] for segment in (*values["finished_segments"], values["latents"])], dim=1)


def own(folder: Path, request: MediaRequest) -> Made:
    """Return diffusers' own result. Its pipeline drops a segment's latents once it has decoded them."""
    length = min(request.num_frames, Checkpoint(folder).defaults.frames_per_chunk)
    latents: list[Tensor] = []

    def decode(vae: Any, segment: Tensor) -> Tensor:
        latents.append(segment)
        pixels: Tensor = decoded(vae, segment)
        return pixels

    decoded = denoise.decode_vae
    inputs: dict[str, Any] = {"image": character_of(request), "driving_video": driving_of(request)}
    with patch.object(denoise, "decode_vae", decode):
        state = own_state(folder, request, **inputs, segment_frame_length=length)
    return Made(torch.cat(latents, dim=1), torch.as_tensor(state.get("videos"))[0])


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_animate.wan_animate2)


@pytest.fixture(scope="module")
def expected(folders: Callable[[Any], Path]) -> Callable[[str], Made]:
    return cache(lambda name: own(folders(CASES[name].kind), request_of(name, folders(CASES[name].kind))))


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), GANGS)
def test_latents_equal_diffusers(
    name: str, num_ranks: int, strategy: str, folders: Callable[[Any], Path], expected: Callable[[str], Made]
) -> None:
    folder = folders(CASES[name].kind)
    request = request_of(name, folder)
    assert expected(name).latents.std() > 0.1
    for values in gang(num_ranks).run(
        denoised_from, folder, request, encoded(folder, request, inputs_of(request)), strategy
    ):
        assert relative_difference(latents_of(values), expected(name).latents) <= TOLERANCE


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes) -> dict[str, Any]:
    """Let each rank attend to its own tokens alone, and to the driving clip."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised_from(folder, request, conditioning, "ulysses")


def test_without_the_exchange_they_do_not(folder: Path, expected: Callable[[str], Made]) -> None:
    request = request_of(SOME, folder)
    for values in gang(2).run(without_exchange, folder, request, encoded(folder, request, inputs_of(request))):
        assert relative_difference(latents_of(values), expected(SOME).latents) > 10 * TOLERANCE


def offloaded(folder: Path, request: MediaRequest, inputs: InputPictures) -> tuple[Tensor, list[str]]:
    """Return the latents with blocks in host memory, and the passes of one block."""
    denoiser, passes = Checkpoint(folder).denoiser(), list[str]()
    block = denoiser.modules["transformer"].get_submodule(f"blocks.{SKIPPED_BLOCK}")
    block.register_forward_pre_hook(lambda _, args, call: passes.append(call["kv_cache_mode"]), with_kwargs=True)
    options = TorchOptions(offloaded_blocks=tiny_animate.NUM_LAYERS)
    pipeline = load_pipeline(Checkpoint(folder), TorchEngine(denoiser, strategy="ulysses", options=options))
    sampler, ranks = pipeline.sampler, tuple(range(dist.get_world_size()))
    state = sampler.begin(request, pipeline.text_encoder.encode(request, inputs))
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, pipeline.engine.predict(sampler.branches(state), ranks))
    return sampler.latents(state)["latents"], passes


def test_the_driving_clip_is_passed_over_once_with_blocks_in_host_memory(
    folder: Path, expected: Callable[[str], Made]
) -> None:
    request = request_of(SOME, folder)
    for latents, passes in gang(2).run(offloaded, folder, request, inputs_of(request)):
        assert relative_difference(latents[:, 1:], expected(SOME).latents) <= TOLERANCE
        assert passes == ["extract", "cached", "cached"]


@pytest.mark.parametrize("name", [SOME, TWO, THREE])
def test_frames_equal_diffusers_and_a_preview_is_one_of_them(
    name: str, folders: Callable[[Any], Path], expected: Callable[[str], Made]
) -> None:
    """The end of the last segment of three is beyond the clip."""
    folder = folders(CASES[name].kind)
    request, pipeline = request_of(name, folder), load_pipeline(Checkpoint(folder))
    *_, before, state = pipeline.states(request, inputs_of(request))
    made = pipeline.decoder.decode(pipeline.sampler.latents(state), request)
    assert (made.shape, made.dtype) == ((request.num_frames, request.height, request.width, 3), np.dtype(np.uint8))
    own_FHWC = (255 * expected(name).pixels_FCHW).permute(0, 2, 3, 1).numpy()
    assert np.abs(made - own_FHWC).max() < 0.51
    parts = [one.frames_FHWC for one in pipeline.decoder.decode_chunks(pipeline.sampler.latents(state), request)]
    assert [len(one) for one in parts] == [1, *[4] * ((request.num_frames - 1) // 4)]
    assert np.abs(np.concatenate(parts).astype(int) - made).max() <= 1
    preview = pipeline.decoder.preview(pipeline.sampler.preview(before), request)
    assert preview.shape == (1, request.height, request.width, 3)


def test_a_preview_between_segments_shows_the_finished_one(folders: Callable[[Any], Path]) -> None:
    """The next segment is noise then."""
    folder = folders(CASES[TWO].kind)
    request, pipeline = request_of(TWO, folder), load_pipeline(Checkpoint(folder))
    states = list(pipeline.states(request, inputs_of(request)))
    between, end = states[request.num_inference_steps], pipeline.sampler.latents(states[-1])
    preview = pipeline.decoder.preview(pipeline.sampler.preview(between), request)
    (first,) = end["finished_segments"]
    assert np.array_equal(preview, pipeline.decoder.preview({**end, "latents": first}, request))


def test_steps_of_all_segments_are_counted(folders: Callable[[Any], Path]) -> None:
    """Request and job agree on their number; a job that moves after each step gives the same bytes."""
    folder = folders(CASES[THREE].kind)
    request, pipeline, checkpoint = request_of(THREE, folder), load_pipeline(Checkpoint(folder)), Checkpoint(folder)
    states = list(pipeline.states(request, inputs_of(request)))
    assert checkpoint.num_steps(request) == pipeline.sampler.num_steps(states[0]) == 3 * 2
    expected, sampler = pipeline.sampler.latents(states[-1]), checkpoint.sampler()
    state = sampler.begin(
        request, pickle.loads(pickle.dumps(checkpoint.text_encoder().encode(request, inputs_of(request))))
    )
    for _ in range(6):
        state = pickle.loads(
            pickle.dumps(sampler.advance(state, pipeline.engine.predict(sampler.branches(state), (0,))))
        )
    assert torch.equal(latents_of(sampler.latents(state)), latents_of(expected))
    lengths = {(num_frames, checkpoint.defaults.num_chunks(num_frames)) for num_frames in (5, 9, 13, 17, 21, 25, 29)}
    assert lengths == {(5, 1), (9, 1), (13, 2), (17, 2), (21, 3), (25, 3), (29, 4)}


def test_a_segment_continues_the_pixels_of_the_one_before(
    folders: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, the first segment is the same, and the second one is not."""
    folder = folders(CASES[TWO].kind)
    request, pipeline = request_of(TWO, folder), load_pipeline(Checkpoint(folder))
    latents = pipeline.denoise(request, inputs_of(request))
    monkeypatch.setattr(patches, "last_frames", lambda vae, one: torch.zeros_like(last_frames(vae, one)))
    others = pipeline.denoise(request, inputs_of(request))
    assert torch.equal(others["finished_segments"][0], latents["finished_segments"][0])
    assert relative_difference(others["latents"], latents["latents"]) > 10 * TOLERANCE


def test_each_segment_passes_once_over_its_part_of_the_clip(folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[THREE].kind)
    request, denoiser, passes = request_of(THREE, folder), Checkpoint(folder).denoiser(), list[str]()
    block = denoiser.modules["transformer"].get_submodule("blocks.0")
    block.register_forward_pre_hook(lambda _, args, call: passes.append(call["kv_cache_mode"]), with_kwargs=True)
    load_pipeline(Checkpoint(folder), TorchEngine(denoiser, strategy="ulysses")).denoise(request, inputs_of(request))
    assert passes == 3 * ["extract", "cached", "cached"]


def test_picture_clip_and_negative_prompt_matter(folder: Path) -> None:
    request, pipeline = request_of(SOME, folder), load_pipeline(Checkpoint(folder))
    latents = pipeline.denoise(request, inputs_of(request))["latents"]
    others = {
        "another character": pipeline.denoise(request, inputs_of(request, character=4)),
        "the clip backwards": pipeline.denoise(request, inputs_of(request, is_backwards=True)),
        "another negative prompt": pipeline.denoise(
            request_of(SOME, folder, negative_prompt="round"), inputs_of(request)
        ),
    }
    for name, other in others.items():
        assert relative_difference(other["latents"], latents) > 10 * TOLERANCE, name


def test_a_job_moves_between_ranks_and_passes_once_over_its_clip(folder: Path) -> None:
    """Both branches of guidance share its keys and values; the negative one skips a block."""
    request, denoiser = request_of(SOME, folder), Checkpoint(folder).denoiser()
    pipeline = load_pipeline(Checkpoint(folder), TorchEngine(denoiser, strategy="ulysses"))
    conditioning = pipeline.text_encoder.encode(request, inputs_of(request))
    state = pipeline.sampler.begin(request, pickle.loads(pickle.dumps(conditioning)))
    pack((conditioning, state), torch.device("cpu"))
    block = denoiser.modules["transformer"].get_submodule(f"blocks.{SKIPPED_BLOCK}")
    calls: list[str] = []
    handle = block.register_forward_pre_hook(
        lambda _, args, call: calls.append(call["kv_cache_mode"]), with_kwargs=True
    )
    whole = [state]
    for _ in range(2):
        predictions = pipeline.engine.predict(pipeline.sampler.branches(whole[-1]), (0,))
        whole.append(pipeline.sampler.advance(whole[-1], predictions))
    handle.remove()
    assert calls == ["extract", "cached", "cached"]
    moved = pickle.loads(pickle.dumps(whole[1]))
    moved = pipeline.sampler.advance(moved, pipeline.engine.predict(pipeline.sampler.branches(moved), (0,)))
    latents, again = (pipeline.sampler.latents(one)["latents"] for one in (whole[-1], moved))
    assert torch.equal(latents, again)


@pytest.mark.parametrize("name", [SOME, "distilled", TWO])
def test_a_gang_prepares_with_blank_inputs(name: str, folders: Callable[[Any], Path]) -> None:
    """Blank steps have the shapes of real ones."""
    folder = folders(CASES[name].kind)
    checkpoint, request = Checkpoint(folder), request_of(name, folder)
    sampler, encoder = checkpoint.sampler(), checkpoint.text_encoder()
    real = sampler.branches(sampler.begin(request, encoder.encode(request, inputs_of(request))))
    for blank, one in zip(checkpoint.first_step(request), real, strict=True):
        assert blank.constants == one.constants
        shapes = [{name: (x.shape, x.dtype) for name, x in branch.inputs.items()} for branch in (blank, one)]
        assert shapes[0] == shapes[1]
    assert len(checkpoint.denoiser().probe()) == 2
    frames_FHWC = checkpoint.decoder().decode(checkpoint.first_latents(request), request)
    num_frames = min(request.num_frames, checkpoint.defaults.frames_per_chunk)
    assert frames_FHWC.shape == (num_frames, request.height, request.width, 3)


def test_an_estimate_counts_the_decode_of_each_segment(folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[TWO].kind)
    checkpoint = Checkpoint(folder, "meta")
    one, two = (
        checkpoint.footprint(replace(request_of(TWO, folder), num_frames=number, num_video_frames=number))
        for number in (9, 17)
    )
    assert one.decode is not None
    assert two.decode == one.decode.times(2)
    assert two.decode_bytes == one.decode_bytes


def test_blank_keys_have_the_shapes_of_real_ones(folder: Path) -> None:
    """The planner counts a step with blank ones."""
    checkpoint, request = Checkpoint(folder), request_of(SOME, folder)
    (branch, *_) = checkpoint.first_step(request)
    module, inputs = checkpoint.denoiser().modules["transformer"], branch.inputs
    real, blank = attention.hoisted(module, inputs), attention._blank(module, inputs)
    assert {name: (x.shape, x.dtype) for name, x in real.items()} == {
        name: (x.shape, x.dtype) for name, x in blank.items()
    }
    assert real[KEYS_VALUES].shape[3:5] == (3, 15)
    per_token = checkpoint.denoiser().hoisted_features
    assert real[KEYS_VALUES].numel() == per_token["video"] * 3 * 15
    assert profile(checkpoint.denoiser()).hoisted_features == per_token


@torch.no_grad()
def test_a_step_at_full_size_is_what_a_gpu_can_record_and_compile(folder: Path, tmp_path: Path) -> None:
    """One block of the published size runs for the default clip of 81 frames: 50 x 40 places of 22 latent frames.

    It is compiled for both passes.
    """
    full = str(tiny_animate.without_weights(folder, tmp_path / "full"))
    positive, negative = first_step(full)
    assert [branch.constants[NEGATIVE] for branch in (positive, negative)] == [False, True]
    model = model_on_gpu(full)
    assert dict(model.stream_lengths(positive.arguments)) == {"video": 22 * 50 * 40}
    for branch in (positive, negative):
        recorded = Recorded(model, branch, team_of_one()).run()
        assert (recorded.found, recorded.is_recorded) == ([], True)
        assert [call["kv_cache_mode"] for _, _, call in recorded.calls.values()] == ["extract", "cached"]
    for call in recorded.calls.values():
        trace(model, call)
    for strategy in ("ulysses2", "ring2", "allgather_kv2"):
        with offline_team(ParallelSpec.of(strategy, 2)) as team:
            divided = Recorded(model_on_gpu(full), positive, team).run()
        assert (divided.found, divided.is_recorded) == ([], True)


def test_the_published_defaults_and_what_they_need(folders: Callable[[Any], Path]) -> None:
    base, distilled = (
        Checkpoint(folders(kind)).defaults for kind in (tiny_animate.wan_animate2, tiny_animate.wan_animate2_distilled)
    )
    assert [(one.num_inference_steps, one.true_cfg_scale) for one in (base, distilled)] == [(40, 3.0), (10, 1.0)]
    assert base.capabilities == ("image-to-video", "video-to-video")
    with pytest.raises(ValueError, match="this model takes exactly 1"):
        base.request(num_pictures=0)
    with pytest.raises(ValueError, match="needs an input clip: send one as video"):
        base.request(num_video_frames=0)
    sizes = {num_frames: Size(width=640, height=800, num_frames=num_frames) for num_frames in (81, 85, 965)}
    assert [base.num_steps_of(base.request(sizes[num_frames])) for num_frames in (81, 85)] == [40, 80]
    assert base.request(sizes[81], cache="fast").cache == "fast"
    with pytest.raises(ValueError, match="cache is 'fast'; this model makes clips in chunks"):
        base.request(sizes[85], cache="fast")
    with pytest.raises(ValueError, match="num_frames is 965; it must be at most 961"):
        base.request(sizes[965])


def test_a_folder_may_have_segments_of_another_length(tmp_path: Path) -> None:
    folder = tiny_animate.wan_animate2_segments(tmp_path / "model")
    assert Checkpoint(folder).defaults.frames_per_chunk == 9
    (folder / "troupe.json").write_text('{"frames_per_chunk": 10}')
    with pytest.raises(ValueError, match="frames_per_chunk is 10; it must be 1 more than a multiple of 4, as 81 is"):
        _ = Checkpoint(folder).defaults
