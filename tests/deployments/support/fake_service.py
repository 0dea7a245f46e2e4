"""A service without models: draws flat pictures whose colour is the seed, and behaves like the real one."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace

import av
import numpy as np
from PIL import Image

from deployments.requests.fields import Quality
from deployments.service.interface import Media, ModelCard, Output, Preview, Progress, Queued, ServiceEvent, StageTimes
from engines.core.spec import Attention
from pipelines.defaults import Defaults
from pipelines.description import usual_description
from pipelines.lora.source import LoraLimits
from pipelines.recipes import Recipe
from pipelines.request import NO_PICTURES, InputPictures, Lora, MediaRequest

ETA_S = 20.0
STEPS_S, DECODE_S = 0.1, 7.0
"""Predicted time for the rest of the steps after each, and for decoding."""
GPU_S = 1.5
CREATED_S = 1_763_690_000
PICTURES = Defaults(
    kind="image",
    width=64,
    height=64,
    num_frames=1,
    fps=0,
    num_inference_steps=4,
    guidance_scale=3.5,
    true_cfg_scale=1.0,
    size_multiple=16,
    frame_multiple=1,
    max_pixels=256 * 256,
    max_frames=1,
    max_steps=100,
)
CLIPS = Defaults(
    kind="video",
    width=32,
    height=32,
    num_frames=17,
    fps=8,
    num_inference_steps=4,
    guidance_scale=0.0,
    true_cfg_scale=5.0,
    size_multiple=16,
    frame_multiple=4,
    max_pixels=128 * 128,
    max_frames=49,
    max_steps=100,
)
EDITS = replace(PICTURES, min_pictures=1, max_pictures=3, takes_mask=True, takes_strength=True)
INPAINTS = replace(EDITS, max_pictures=1, needs_mask=True)
LAYERS = replace(
    PICTURES,
    max_pixels=512 * 512,
    min_pictures=1,
    max_pictures=1,
    enlarges_pictures=True,
    describes_pictures=True,
    num_layers=2,
    max_layers=5,
)
BOTH = replace(CLIPS, picture_width=96, picture_height=64, max_pictures=1, make_sound=True)
CHANGED_CLIPS = replace(
    CLIPS,
    width=64,
    height=64,
    needs_video=True,
    max_video_frames=49,
    keeps_length=True,
    takes_strength=True,
    strength=0.5,
)
REFERRED_CLIPS = replace(
    CLIPS, width=64, height=64, max_pictures=3, max_video_frames=49, takes_both=True, needs_source=True, cuts_video=True
)
DRIVEN_CLIPS = replace(
    CHANGED_CLIPS, min_pictures=1, max_pictures=1, takes_both=True, takes_strength=False, shaped_by_picture=True
)
CONTINUED_CLIPS = replace(CLIPS, min_video_frames=5, max_video_frames=17)
CONTROLLED = replace(PICTURES, takes_control=True, needs_control=True, control_scale=1.0, takes_control_guidance=True)
BEGUN_CLIPS = replace(CLIPS, width=64, height=64, max_pictures=1, takes_frame_indices=True)


@dataclass
class FakeService:
    """``step_s`` is the time of a step; with ``permits`` a step needs one as well. ``before`` runs first in each
    request, ``at_step`` in each step.

    Both may raise. Models in ``reasons`` are not ready; requests may wait for those in ``rebuilt``. Without
    ``knows_times`` nothing was measured yet, without ``same_bytes`` gangs are elastic. ``performed`` are the requests,
    ``inputs`` their inputs, ``closed`` the ids of those closed before their end. ``on_load`` runs before an adapter is
    ``loaded``, and may raise. ``takes_pictures``: two more models do; ``takes_apart``: one splits them into layers;
    ``makes_both``: one makes clips and pictures; ``only_inpaints``: one needs a mask. ``takes_clips``: two more take a
    clip, one to change it and one to continue it; ``takes_control``: one follows a control picture. ``defaults``: of
    further models, or other ones for these.
    """

    step_s: float = 0.005
    permits: asyncio.Semaphore | None = None
    before: Callable[[MediaRequest], None] = lambda request: None
    at_step: Callable[[MediaRequest, int], None] = lambda request, step: None
    reasons: dict[str, str] = field(default_factory=dict)
    rebuilt: frozenset[str] = frozenset()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loras: dict[str, tuple[Lora, ...]] = field(default_factory=dict)
    enhances_prompts: bool | None = None
    recipes: dict[str, Recipe] = field(default_factory=dict)
    qualities: dict[Quality, str] = field(default_factory=dict)
    runtime_loras: LoraLimits | None = None
    on_load: Callable[[Lora], None] = lambda lora: None
    loaded: dict[str, Lora] = field(default_factory=dict)
    knows_times: bool = True
    same_bytes: bool = True
    takes_pictures: bool = False
    takes_apart: bool = False
    makes_both: bool = False
    only_inpaints: bool = False
    takes_clips: bool = False
    takes_control: bool = False
    defaults: Mapping[str, Defaults] = field(default_factory=dict)
    attentions: tuple[Attention, ...] = ("auto",)
    performed: list[MediaRequest] = field(default_factory=list)
    inputs: list[InputPictures] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def cards(self) -> Mapping[str, ModelCard]:
        defaults = {"fake-pictures": PICTURES, "fake-clips": CLIPS}
        if self.takes_pictures:
            defaults |= {"fake-edits": EDITS, "fake-begun-clips": BEGUN_CLIPS}
        if self.takes_apart:
            defaults |= {"fake-layers": LAYERS}
        if self.makes_both:
            defaults |= {"fake-both": BOTH}
        if self.only_inpaints:
            defaults |= {"fake-inpaints": INPAINTS}
        if self.takes_clips:
            defaults |= {"fake-changed-clips": CHANGED_CLIPS, "fake-continued-clips": CONTINUED_CLIPS}
        if self.takes_control:
            defaults |= {"fake-controlled": CONTROLLED}
        defaults |= self.defaults
        return {
            name: ModelCard(
                name=name,
                family="fake",
                created=CREATED_S,
                defaults=one,
                description=usual_description(one),
                aliases=self.aliases.get(name, ()),
                loras=self.loras.get(name, ()),
                enhances_prompts=self.enhances_prompts,
                recipes=self.recipes,
                qualities=self.qualities,
                runtime_loras=self.runtime_loras,
                attentions=self.attentions,
            )
            for name, one in defaults.items()
        }

    def permit(self, num_steps: int = 1) -> None:
        """Release steps that wait for a permit."""
        assert self.permits is not None
        for _ in range(num_steps):
            self.permits.release()

    async def look(self) -> None:
        pass

    async def not_ready(self, max_age_s: float = 0.0) -> Mapping[str, str]:
        return self.reasons

    def retry_after_s(self, model: str) -> float:
        return 2.0

    def may_wait_for(self, model: str) -> bool:
        return model in self.rebuilt

    async def load_lora(self, model: str, lora: Lora) -> None:
        assert model in self.cards()
        self.on_load(lora)
        self.loaded[lora.key] = lora

    async def remove_lora(self, model: str, lora: Lora) -> None:
        self.loaded.pop(lora.key, None)

    async def perform(
        self, request: MediaRequest, output: Output, pictures: InputPictures = NO_PICTURES
    ) -> AsyncGenerator[ServiceEvent, None]:
        self.performed.append(request)
        self.inputs.append(pictures)
        try:
            async for event in self._perform(request, output):
                yield event
            self.finished.append(request.request_id)
        finally:
            if request.request_id not in self.finished:
                self.closed.append(request.request_id)

    async def _perform(self, request: MediaRequest, output: Output) -> AsyncGenerator[ServiceEvent, None]:
        self.before(request)
        eta_s = ETA_S + request.seed % 10 if self.knows_times else None
        num_before = len(self.performed) - len(self.finished) - len(self.closed) - 1
        yield Queued(eta_s=eta_s, decode_s=DECODE_S if self.knows_times else None, num_before=num_before)
        start_s = time.perf_counter()
        num_previews = 0
        for step in range(1, request.num_inference_steps + 1):
            await asyncio.sleep(self.step_s)
            if self.permits is not None:
                await self.permits.acquire()
            self.at_step(request, step)
            yield Progress(
                step=step,
                num_steps=request.num_inference_steps,
                eta_s=STEPS_S if self.knows_times else None,
                gpu_s=GPU_S * step / request.num_inference_steps,
            )
            if step in request.preview_steps:
                yield Preview(index=num_previews, step=step, data=picture(request, Output(format="png")))
                num_previews += 1
        total_s = time.perf_counter() - start_s
        seconds = {"queue_s": 0.001, "encode_s": 0.002, "denoise_s": total_s, "decode_s": 0.003, "total_s": total_s}
        timings = StageTimes(**seconds, was_warm=False, gpu_s=GPU_S, eta_s=eta_s, same_bytes=self.same_bytes)
        data = clip(request) if request.kind == "video" else picture(request, output)
        further = tuple(layer(request, output, number) for number in range(1, request.num_layers))
        thumbnail = picture(request, Output(format="webp")) if request.kind == "video" else b""
        yield Media(
            data=data,
            format=output.format,
            seed=request.seed,
            timings=timings,
            thumbnail=thumbnail,
            further=further,
            revised_prompt=request.revised_prompt,
        )


def colour(seed: int) -> tuple[int, int, int]:
    return seed % 256, seed // 256 % 256, 99


def picture(request: MediaRequest, output: Output) -> bytes:
    file = io.BytesIO()
    image = Image.new("RGB", (request.width, request.height), colour(request.seed))
    image.save(file, output.format, quality=output.compression)
    return file.getvalue()


def layer(request: MediaRequest, output: Output, number: int) -> bytes:
    """Return a layer's file; higher layers are more transparent."""
    file = io.BytesIO()
    Image.new("RGBA", (request.width, request.height), (*colour(request.seed), 255 - number)).save(
        file, output.format, lossless=True
    )
    return file.getvalue()


def clip(request: MediaRequest) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=request.fps)
        stream.width, stream.height, stream.pix_fmt = request.width, request.height, "yuv420p"
        stream.options, stream.codec_context.thread_count = {"x264-params": "cpu-independent=1"}, 1  # else bytes vary
        frame_HWC = np.full((request.height, request.width, 3), colour(request.seed), np.uint8)
        for _ in range(request.num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


class FailingService(FakeService):
    """Raises each of ``failures`` once, like a gang that refuses the request, then works."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        self.before = self.fail

    def fail(self, request: MediaRequest) -> None:
        if self.failures:
            raise self.failures.pop(0)
