"""Pipelines without modular blocks give the pixels of their own call as users make it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AnimateDiffPipeline
from numpy.typing import NDArray
from PIL import Image

from engines.core.engine import JobFailedError, RankContext
from engines.gang.gang_config import RankParts
from engines.gang.jobs.job import Job
from engines.gang.jobs.rank_jobs import RankJobs
from engines.gang.jobs.step_plan import Emit, JobStep, StepPlan, Work
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_index
from pipelines.models import registry
from pipelines.models.generic import whole as generic
from pipelines.models.generic.whole import LISTED
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from pipelines.whole_pipeline import CALL, CallProgress, PausedCall, WholeSampler, follow
from tests.pipelines.support.checkpoints import tiny_vace, tiny_whole, tiny_whole_qwen
from tests.pipelines.support.references.video import frames, named, picture
from tests.pipelines.support.references.video import pictures_of as clip_pictures
from tests.support.patience import PATIENCE_S

SIDE, NUM_STEPS, NUM_FRAMES, SEED, PROMPT = 64, 2, 5, 5, "a fox"
CPU = torch.device("cpu")
QUICK = (
    tiny_whole.aura_flow,
    tiny_whole.chroma,
    tiny_whole.chroma_over,
    tiny_whole.cogvideox,
    tiny_whole.cogview4,
    tiny_whole.lumina,
    tiny_whole.lumina2,
    tiny_whole.ovis_image,
    tiny_whole.pixart_sigma,
    tiny_whole.sana,
    tiny_whole_qwen.hunyuan_image,
    tiny_whole_qwen.hunyuan_image_distilled,
    tiny_whole_qwen.kandinsky5_clips,
    tiny_whole_qwen.longcat_image,
)
CLIPS = (tiny_whole.cogvideox_over, tiny_whole.wan_over)
"""Pipelines that take a clip."""
CONTROLLED = (tiny_whole.flux_controlled, tiny_whole.sdxl_controlled)
"""Pipelines that follow a control picture."""
LARGE = (tiny_whole.hidream, tiny_whole_qwen.kandinsky5, tiny_whole_qwen.glm_image)
"""Pipelines that draw 512x512 or 1024x1024 for any requested size, or write 261 tokens first, which takes seconds."""
CONTROLS = {"FluxControlNetPipeline": "control_image", "StableDiffusionXLControlNetPipeline": "image"}
Make = Callable[[Path], Path]
MAKES = [*QUICK, tiny_whole.cogvideox_over, *(pytest.param(make, marks=pytest.mark.slow) for make in LARGE)]


@pytest.fixture
def as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Wan VACE, which has a family, stand for a pipeline without blocks and with the same call."""
    monkeypatch.delitem(registry.FAMILY_FOLDERS, "WanVACETransformer3DModel")
    monkeypatch.setattr(generic, "has_blocks", lambda path: False)


def request_of(checkpoint: Checkpoint, **changes: Any) -> MediaRequest:
    num_frames = NUM_FRAMES if checkpoint.defaults.kind == "video" else None
    size = Size(width=SIDE, height=SIDE, num_frames=num_frames)
    settings = {"prompt": PROMPT, "num_inference_steps": NUM_STEPS, "seed": SEED}
    return checkpoint.defaults.request(size, **{**settings, **changes})


def pictures_of(request: MediaRequest) -> InputPictures:
    if request.num_video_frames:
        return clip_pictures(frames(SIDE, SIDE, request.num_video_frames))
    ramp = bytes(range(256)) * (SIDE * SIDE * 3 // 256)
    if request.has_control:
        return InputPictures(control=InputPicture(width=SIDE, height=SIDE, mode="RGB", data=ramp))
    if not request.num_pictures:
        return NO_PICTURES
    return InputPictures(pictures=(InputPicture(width=SIDE, height=SIDE, mode="RGB", data=ramp),))


def own_frames(folder: Path, request: MediaRequest, **arguments: Any) -> NDArray[np.uint8]:
    """Return the pipeline's own result, as users call it: with default arguments, as Pillow's pictures."""
    return frames_by(own_pipeline(folder), request, **arguments)


def own_pipeline(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    import diffusers

    pipeline = getattr(diffusers, read_index(folder)["_class_name"]).from_pretrained(folder, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def frames_by(pipeline: Any, request: MediaRequest, **arguments: Any) -> NDArray[np.uint8]:
    takes_length = "num_frames" in inspect.signature(type(pipeline).__call__).parameters
    arguments |= {"num_frames": request.num_frames} if takes_length else {}
    arguments |= named(frames(SIDE, SIDE, request.num_video_frames)) if request.num_video_frames else {}
    if request.num_pictures:
        picture = pictures_of(request).pictures[0].image()
        arguments |= {"image": [picture] if type(pipeline).__name__ in LISTED else picture}
    if request.has_control:
        arguments |= {CONTROLS[type(pipeline).__name__]: pictures_of(request).control.image()}  # type: ignore[union-attr]
    made = pipeline(
        prompt=request.prompt,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pil",
        **arguments,
    )
    media = made.frames[0] if request.kind == "video" else made[next(iter(made))]
    return np.stack([np.asarray(frame) for frame in media[: request.num_frames]])


@pytest.mark.parametrize("make", MAKES)
def test_the_pixels_are_those_of_the_pipelines_own_call(make: Make, folders: Callable[[Make], Path]) -> None:
    folder = folders(make)
    checkpoint = Checkpoint(folder)
    request = request_of(checkpoint)
    frames = load_pipeline(checkpoint).run(request, pictures_of(request))
    assert np.array_equal(frames, own_frames(folder, request))
    assert frames.std() > 5, "a picture of one colour would hide faults"


def test_what_a_request_sets_reaches_the_call(folders: Callable[[Make], Path]) -> None:
    folder = folders(tiny_whole.chroma_over)
    checkpoint = Checkpoint(folder)
    request = request_of(checkpoint, negative_prompt="fog", true_cfg_scale=2.0, strength=0.5, num_inference_steps=4)
    frames = load_pipeline(checkpoint).run(request, pictures_of(request))
    own = own_frames(folder, request, negative_prompt="fog", guidance_scale=2.0, strength=0.5)
    assert np.array_equal(frames, own)
    assert not np.array_equal(own, own_frames(folder, request, guidance_scale=2.0, strength=0.5))


def test_a_clip_reaches_the_call_with_its_strength(folders: Callable[[Make], Path]) -> None:
    """The input frames and their order matter."""
    folder = folders(tiny_whole.wan_over)
    checkpoint = Checkpoint(folder)
    request = request_of(checkpoint, strength=0.5, num_inference_steps=4, true_cfg_scale=2.0, negative_prompt="fog")
    pipeline = load_pipeline(checkpoint)
    made = pipeline.run(request, pictures_of(request))
    assert np.array_equal(made, own_frames(folder, request, strength=0.5, guidance_scale=2.0, negative_prompt="fog"))
    backwards = clip_pictures(type(seen := frames(SIDE, SIDE, NUM_FRAMES))(reversed(seen)))
    assert not np.array_equal(made, pipeline.run(request, backwards))


@pytest.mark.parametrize("make", CONTROLLED)
def test_the_weight_and_the_steps_of_a_control_reach_the_call(make: Make, folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(make))
    assert checkpoint.defaults.capabilities == ("text-to-image", "control")
    settings = {"control_guidance_start": 0.25, "control_guidance_end": 0.75}
    request = request_of(checkpoint, num_inference_steps=4, control_scale=0.5, **settings)
    made = load_pipeline(checkpoint).run(request, pictures_of(request))
    own = own_frames(checkpoint.path, request, controlnet_conditioning_scale=0.5, **settings)
    assert np.array_equal(made, own)
    assert not np.array_equal(own, own_frames(checkpoint.path, request, controlnet_conditioning_scale=0.5))


def test_a_control_picture_is_cut_to_the_size(folders: Callable[[Make], Path]) -> None:
    """The middle of the picture is used."""
    checkpoint = Checkpoint(folders(tiny_whole.sdxl_controlled))
    request, pipeline = request_of(checkpoint), load_pipeline(checkpoint)
    control = pictures_of(request).control
    assert control is not None
    wide = Image.new("RGB", (3 * SIDE, SIDE))
    wide.paste(control.image(), (SIDE, 0))
    made = pipeline.run(request, InputPictures(control=InputPicture.of(wide)))
    assert np.array_equal(made, pipeline.run(request, pictures_of(request)))


@pytest.mark.usefixtures("as_unknown")
def test_a_control_clip_may_be_left_out(folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_vace.wan_vace))
    without = request_of(checkpoint)
    with_clip = replace(without, num_video_frames=NUM_FRAMES)
    pipeline = load_pipeline(checkpoint)
    made = pipeline.run(with_clip, pictures_of(with_clip))
    assert np.array_equal(made, own_frames(checkpoint.path, with_clip))
    assert not np.array_equal(made, pipeline.run(without, NO_PICTURES))


@pytest.mark.usefixtures("as_unknown")
def test_pictures_of_what_a_clip_shows_come_beside_it(folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_vace.wan_vace))
    request = request_of(checkpoint, num_video_frames=NUM_FRAMES, num_pictures=2)
    shown = [picture(80, SIDE, seed) for seed in (7, 8)]
    inputs = replace(pictures_of(request), pictures=tuple(map(InputPicture.of, shown)))
    made = load_pipeline(checkpoint).run(request, inputs)
    own = own_frames(checkpoint.path, replace(request, num_pictures=0), reference_images=shown)
    assert np.array_equal(made, own)
    assert not np.array_equal(made, load_pipeline(checkpoint).run(request, pictures_of(request)))


@pytest.mark.usefixtures("as_unknown")
def test_a_mask_of_each_frame_reaches_the_call(folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_vace.wan_vace))
    request = request_of(checkpoint, num_video_frames=NUM_FRAMES, has_mask=True)
    masks = [Image.new("RGB", (SIDE, SIDE)) for _ in range(NUM_FRAMES)]
    for number, mask in enumerate(masks):
        mask.paste("white", (8 * number, 8, 8 * number + 24, 48))
    inputs = replace(pictures_of(request), video_mask=clip_pictures(type(frames(1, 1, 1))(masks)).video)
    made = load_pipeline(checkpoint).run(request, inputs)
    assert np.array_equal(made, own_frames(checkpoint.path, request, mask=masks))
    assert not np.array_equal(made, own_frames(checkpoint.path, request, mask=masks[::-1]))


@pytest.mark.usefixtures("as_unknown")
def test_the_weight_of_a_clip_reaches_the_call(folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_vace.wan_vace))
    request = request_of(checkpoint, num_video_frames=NUM_FRAMES, control_scale=0.25)
    made = load_pipeline(checkpoint).run(request, pictures_of(request))
    assert np.array_equal(made, own_frames(checkpoint.path, request, conditioning_scale=0.25))
    assert not np.array_equal(made, own_frames(checkpoint.path, request))
    assert checkpoint.defaults.control_scale == 1.0
    with pytest.raises(ValueError, match=r"control_scale is 0\.25; this model takes no control picture"):
        request_of(Checkpoint(folders(tiny_whole.wan_over)), control_scale=0.25)


@pytest.mark.usefixtures("as_unknown")
def test_clips_are_taken_as_the_signature_says(folders: Callable[[Make], Path]) -> None:
    over, wan, vace = (Checkpoint(folders(make)).defaults for make in (*CLIPS, tiny_vace.wan_vace))
    assert [one.capabilities for one in (over, wan, vace)] == [
        ("video-to-video",),
        ("video-to-video",),
        ("text-to-video", "image-to-video", "video-to-video"),
    ]
    assert all(one.keeps_length and one.kind == "video" for one in (over, wan, vace))
    assert (wan.strength, wan.takes_strength, wan.num_steps_of(wan.request())) == (0.8, True, 40)
    assert not vace.takes_strength
    assert [one.masks_video for one in (over, wan, vace)] == [False, False, True]


def test_capabilities_are_those_of_the_signature(folders: Callable[[Make], Path]) -> None:
    paints, paints_over, clips = (
        Checkpoint(folders(make)).defaults for make in (tiny_whole.chroma, tiny_whole.chroma_over, tiny_whole.cogvideox)
    )
    assert (paints.kind, paints.width, paints.num_inference_steps) == ("image", 512, 35), "1024 with 8x8 pixels a value"
    assert (paints.guidance_scale, paints.true_cfg_scale, paints.max_pictures) == (0.0, 5.0, 0)
    assert (paints_over.min_pictures, paints_over.takes_strength, paints_over.strength) == (1, True, 0.9)
    assert (clips.kind, clips.width, clips.height, clips.num_frames, clips.frame_multiple) == ("video", 64, 64, 5, 4)
    with pytest.raises(ValueError, match="cache is 'fast'; this model runs all steps of its pipeline"):
        paints.request(cache="fast", num_inference_steps=20)


def test_a_start_that_opens_a_folder_often_says_it_once(
    folders: Callable[[Make], Path], caplog: pytest.LogCaptureFixture
) -> None:
    registry._log_whole.cache_clear()
    for _ in range(2):
        _ = Checkpoint(folders(tiny_whole.chroma)).defaults
    assert caplog.messages == ["diffusers has no blocks for the ChromaPipeline: its own call runs on one rank a gang"]


def test_a_distilled_scale_beside_a_guider_reaches_the_call(folders: Callable[[Make], Path]) -> None:
    distilled, guided = (
        Checkpoint(folders(make)) for make in (tiny_whole_qwen.hunyuan_image_distilled, tiny_whole_qwen.hunyuan_image)
    )
    assert (distilled.defaults.guidance_scale, guided.defaults.guidance_scale) == (3.25, 0.0)
    request = request_of(distilled, guidance_scale=7.0)
    own = own_frames(distilled.path, request, distilled_guidance_scale=7.0)
    assert np.array_equal(load_pipeline(distilled).run(request), own)
    assert not np.array_equal(own, own_frames(distilled.path, request))


def test_a_pipeline_that_takes_a_list_has_a_single_picture_in_one(folders: Callable[[Make], Path]) -> None:
    """Its call needs the list's length. Later code fails with pictures, in diffusers' own call too."""
    checkpoint = Checkpoint(folders(tiny_whole_qwen.glm_image))
    assert checkpoint.defaults.max_pictures == 4
    request = request_of(checkpoint, num_pictures=1)
    sampler = checkpoint.sampler()
    assert isinstance(sampler, WholeSampler)
    (picture,) = sampler._inputs(request, pictures_of(request))["image"]
    assert picture.size == (SIDE, SIDE)


def test_clips_have_the_size_of_their_transformer(tmp_path: Path) -> None:
    """The pipeline's own call does the same: AnimateDiff's adapters were trained with models of 512 x 512."""
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text('{"sample_size": 64}')
    (tmp_path / "model_index.json").write_text('{"unet": ["diffusers", "UNetMotionModel"]}')
    defaults = generic.WholeSpec(AnimateDiffPipeline).defaults(tmp_path)
    assert (defaults.kind, defaults.width, defaults.height) == ("video", 512, 512)


def test_the_size_is_that_of_the_call(folders: Callable[[Make], Path]) -> None:
    """One latent value is 8x8 pixels here, and 32x32 in the published HunyuanImage: 2048x2048."""
    defaults = Checkpoint(folders(tiny_whole_qwen.hunyuan_image)).defaults
    assert (defaults.width, defaults.height) == (512, 512)


class OneRank:
    """A rank that works on one checkpoint, without Ray."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(folder)
        engine = self.checkpoint.own_engine()
        assert engine is not None
        parts = RankParts(engine=engine, sampler=self.checkpoint.sampler())
        self.jobs = RankJobs(parts, RankContext(rank=0, num_ranks=1, device="cpu"))
        self._encoder, self._decoder = self.checkpoint.text_encoder(), self.checkpoint.decoder()
        self._requests: dict[str, MediaRequest] = {}

    def admit(self, job_id: str, request: MediaRequest) -> None:
        self._requests[job_id] = request
        conditioning = self._encoder.encode(request)
        job = Job(job_id=job_id, request=request, conditioning=conditioning, num_steps=NUM_STEPS, estimates_s={1: 1.0})
        self.jobs.admit(job)

    def finished(self, job_id: str) -> NDArray[np.uint8]:
        """Return the picture of a job after all its steps, without ending the job."""
        state = self.jobs._residents[job_id].state
        return self._decoder.decode(self.checkpoint.sampler().latents(state), self._requests[job_id])

    def step(self, job_id: str, step: int, emit: Emit | None = None) -> NDArray[np.uint8] | None:
        """Take a step and return what it emits, decoded."""
        work = Work(job_steps=(JobStep(job_id=job_id, step=step, emit=emit),), ranks=(0,))
        report, made = self.jobs.execute(StepPlan(sequence=step, works=(work,)))
        assert report.failures == (), report.failures[0].error
        assert report.predicted
        if not emit:
            return None
        decode = self._decoder.decode if emit == "final" else self._decoder.preview
        return decode(made[0], self._requests[job_id])


def threads_of_calls() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == CALL]


def test_jobs_that_take_turns_do_not_mix(folders: Callable[[Make], Path]) -> None:
    """Both run at once on one loaded pipeline, whose scheduler counts steps."""
    folder = folders(tiny_whole.aura_flow)
    rank = OneRank(folder)
    requests = {"a": request_of(rank.checkpoint), "b": request_of(rank.checkpoint, seed=6, prompt="a boat")}
    for job_id, request in requests.items():
        rank.admit(job_id, request)
        rank.step(job_id, 1)
    for job_id, request in requests.items():
        frames = rank.step(job_id, 2, "final")
        assert frames is not None
        assert np.array_equal(frames, own_frames(folder, request))
    assert threads_of_calls() == []


@pytest.mark.parametrize(
    "make",
    [
        *(tiny_whole.aura_flow, tiny_whole.chroma, tiny_whole_qwen.hunyuan_image, tiny_whole_qwen.longcat_image),
        pytest.param(tiny_whole_qwen.kandinsky5, marks=pytest.mark.slow),
    ],
)
def test_a_preview_of_a_flow_is_the_picture_that_the_step_expects(make: Make, folders: Callable[[Make], Path]) -> None:
    """After the last step it is the picture itself."""
    rank = OneRank(folders(make))
    rank.admit("a", request_of(rank.checkpoint))
    first, last = rank.step("a", 1, "preview"), rank.step("a", 2, "preview")
    final = rank.finished("a")
    assert first is not None
    assert last is not None
    assert np.abs(last.astype(int) - final).max() <= 1
    assert np.abs(first.astype(int) - final).max() > 1


def test_a_job_that_is_dropped_ends_where_it_is(folders: Callable[[Make], Path]) -> None:
    rank = OneRank(folders(tiny_whole.aura_flow))
    rank.admit("a", request_of(rank.checkpoint))
    rank.step("a", 1)
    (thread,) = threads_of_calls()
    rank.jobs.execute(StepPlan(sequence=2, drops=("a",)))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert rank.jobs.job_ids == ()


def test_a_fault_of_the_pipeline_fails_its_job_alone(folders: Callable[[Make], Path]) -> None:
    rank = OneRank(folders(tiny_whole.aura_flow))
    rank.admit("a", request_of(rank.checkpoint))
    rank.admit("b", request_of(rank.checkpoint))
    pipeline = rank.checkpoint._whole
    vae, pipeline.transformer.forward = pipeline.vae, None
    with pytest.raises(AssertionError, match="failed at step 1: TypeError"):
        rank.step("a", 1)
    del pipeline.transformer.forward
    rank.step("b", 1)
    assert pipeline.vae is vae
    assert isinstance(rank.step("b", 2, "final"), np.ndarray)


def test_latents_that_are_not_finite_fail_the_job(folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_whole.aura_flow))
    pipeline = load_pipeline(checkpoint)
    with torch.no_grad():
        next(checkpoint._whole.transformer.parameters()).fill_(float("nan"))
    with pytest.raises(JobFailedError, match="latents of this request are not finite"):
        pipeline.run(request_of(checkpoint))


class Solver:
    """A scheduler whose step returns its input."""

    order = 2

    def step(self, model_output: int, timestep: int, sample: torch.Tensor) -> tuple[torch.Tensor]:
        return (sample,)


def test_a_second_order_scheduler_pauses_after_two_calls_and_its_copies_never() -> None:
    import copy

    solver, progress, pauses = Solver(), CallProgress(), []
    follow(solver, progress, lambda: pauses.append(progress.num_calls))
    other = copy.deepcopy(solver)
    for _ in range(4):
        solver.step(1, timestep=0, sample=torch.zeros(1))
        other.step(1, timestep=0, sample=torch.zeros(1))
    assert pauses == [2, 4]


def test_a_call_runs_while_its_owner_waits() -> None:
    done: list[str] = []

    def work(pause: Callable[[], None]) -> str:
        for name in ("first", "second"):
            done.append(name)
            pause()
        return "result"

    call = PausedCall(work, CPU)
    assert done == []
    call.resume()
    assert (done, call.has_ended) == (["first"], False)
    for _ in range(4):  # more than there are pauses
        call.resume()
    assert (done, call.has_ended, call.result) == (["first", "second"], True, "result")


def test_steps_of_another_number_than_expected_end_with_the_last(folders: Callable[[Make], Path]) -> None:
    """The pipeline takes 2 of 4 steps for a strength of 0.5, whatever the job counts."""
    folder = folders(tiny_whole.chroma_over)
    checkpoint = Checkpoint(folder)
    request = request_of(checkpoint, strength=0.5, num_inference_steps=4)
    sampler = checkpoint.sampler()
    conditioning = checkpoint.text_encoder().encode(request, pictures_of(request))
    frames = checkpoint.decoder().decode(sampler.latents(sampler.begin(request, conditioning)), request)
    assert np.array_equal(frames, own_frames(folder, request, strength=0.5))


def test_what_needs_blocks_is_refused(folders: Callable[[Make], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_whole.aura_flow))
    assert checkpoint.first_steps([], ("transformer",)) == ()
    assert "is called by its own pipeline" in checkpoint.eager_only(is_split=False)
    with pytest.raises(ValueError, match="AuraFlowPipeline runs as a whole pipeline"):
        checkpoint.weights_bytes()
