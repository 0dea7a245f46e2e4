"""Defaults and limits of a model's requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

from pipelines.caching import computed_steps
from pipelines.request import (
    MediaKind,
    MediaRequest,
    check_control_guidance,
    check_control_scale,
    check_frame_indices,
    check_second_stage,
    check_sound,
    check_sound_samples,
    keep_audio_fault,
)
from pipelines.size import MAX_SIDES, Size, SizeLimits, check_frames, largest_num_frames
from pipelines.solver import NO_SOLVER_LIMITS, SolverLimits, check_guidance
from pipelines.wording import counted

PICTURES = ("picture", "pictures")
SENT_PICTURES = ("input picture was", "input pictures were")


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Defaults and limits of a model's requests. Checks raise ValueError with the given and allowed values."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}  # the API's document has them

    kind: MediaKind
    """Kind of media that the model makes first of all; a clip model may also make pictures (``picture_width``)."""
    width: int
    """Default width of the result, in pixels."""
    height: int
    """Default height of the result, in pixels."""
    num_frames: int
    """Default length of a clip, in frames; 1 for pictures."""
    fps: int
    """Default rate of a clip, in frames a second; 0 for pictures."""
    num_inference_steps: int
    """Default number of solver steps, without the factors of ``num_steps_of``."""
    guidance_scale: float
    """Default distilled scale, an input of the transformer; 0: the model has none."""
    true_cfg_scale: float
    """Default scale of classifier-free guidance; up to 1: none, one branch a step."""
    guidance_offset: float = 0.0
    """Difference of ``true_cfg_scale`` and clients' ``guidance_scale``: 1 where a scale of 0 means no guidance."""
    takes_guidance: bool = True
    """Requests may have classifier-free guidance, a ``true_cfg_scale`` above 1."""
    guides_beside_negative: bool = False
    """Without a negative prompt there is no classifier-free guidance, whatever ``true_cfg_scale``; "" is one."""
    size_multiple: int
    """Divisor of width and height."""
    frame_multiple: int
    """A clip has 1 + a multiple of this many frames."""
    max_pixels: int
    """Largest product of width and height."""
    max_frames: int
    """Longest clip; 1 for pictures."""
    max_steps: int
    """Largest ``num_inference_steps``."""
    max_pictures: int = 0
    """Most input pictures; 0: the model takes none."""
    min_pictures: int = 0
    """Fewest input pictures; above 0, a prompt alone is refused."""
    takes_frame_indices: bool = False
    """Requests may place pictures at frames; without it, one is the first, and two the first and last."""
    takes_mask: bool = False
    """Requests may have a mask with their picture."""
    needs_mask: bool = False
    """Requests must have a mask."""
    masks_video: bool = False
    """Requests may have a mask with their clip."""
    max_video_frames: int = 0
    """Most frames of an input clip, at ``video_fps``; 0: the model takes none."""
    min_video_frames: int = 1
    """Fewest frames of an input clip, at ``video_fps``."""
    video_fps: int = 0
    """Rate of an input clip, in frames a second; 0: that of the result."""
    max_videos: int = 1
    """Most input clips, if it takes any."""
    video_sound_rate: int = 0
    """Samples a second of the sound of clips that the model hears (``keep_audio``); 0: it hears none."""
    needs_video: bool = False
    """Requests must have a clip."""
    video_needs_lora: bool = False
    """The clip is the context of an adapter, which requests with one must name."""
    takes_both: bool = False
    """Requests may have input pictures beside the clip."""
    needs_source: bool = False
    """Requests must have input pictures or a clip; either is enough."""
    max_reference_aspect: float = 0.0
    """Most that one side of an input exceeds the other, as a factor; 0: no limit."""
    cuts_video: bool = False
    """Frames of the clip beyond the length of the result are left out."""
    keeps_length: bool = False
    """The result has as many frames as the input clip."""
    shaped_by_picture: bool = False
    """The result has the shape of its first picture; the input clip is shown whole in it, on black."""
    takes_control: bool = False
    """Requests may have a control picture, and its ``control_scale``."""
    needs_control: bool = False
    """Requests must have a control picture."""
    control_scale: float = 0.0
    """Default weight of the control, or of the input clip; 0: it is fixed."""
    takes_control_guidance: bool = False
    """Requests may limit the control to a share of the steps."""
    takes_strength: bool = False
    """Requests may set ``strength``: how much of their picture or clip is repainted."""
    strength: float = 1.0
    """Default strength: the share of the steps to run, rounded up, or down with ``rounds_steps_down``."""
    strength_needs_mask: bool = False
    """Strength is allowed only with a mask."""
    rounds_steps_down: bool = False
    """A strength's share of the steps is rounded down, as in older pipelines of diffusers."""
    fits_pictures: bool = False
    """Crop pictures to the request's size; the pipeline's blocks would resize them to sizes unknown to this model."""
    enlarges_pictures: bool = False
    """The result has the model's number of pixels, even for a small input picture."""
    describes_pictures: bool = False
    """The prompt may be empty: the model writes one from the picture."""
    num_layers: int = 0
    """Default number of layers with opacity that a picture is split into; 0: one opaque picture."""
    max_layers: int = 0
    """Most layers of a request; 0: the model makes opaque pictures."""
    make_sound: bool = False
    """Clips have sound unless the request disables it."""
    stage_scale: float = 0.0
    """Factor of a clip's sides between the passes of requests with a second one (0: there are none)."""
    max_tokens: int = 0
    """Prompt tokens that reach the model (0: the pipeline's own limit)."""
    solver_order: int = 1
    """Forwards of a branch in each step."""
    extra_steps: int = 0
    """Forwards added to (or subtracted from) those of all steps."""
    solver: SolverLimits = NO_SOLVER_LIMITS
    """Scheduler and schedules that requests may choose, from the folder alone."""
    takes_cache: bool = True
    """Requests may reuse predictions (``cache``)."""
    min_steps: int = 1
    """Smallest ``num_inference_steps``."""
    min_side: int = 1
    """Smallest width and height."""
    min_frames: int = 1
    """Shortest clip."""
    frames_per_chunk: int = 0
    """Clips are made in chunks of this many frames (0: whole), each with all steps."""
    first_chunk_steps: int = 1
    """Factor on the first chunk's number of steps."""
    chunk_overlap: int = 0
    """Frames at the end of a chunk that the next one begins with."""
    picture_width: int = 0
    """Default size of pictures of a clip model (see ``of``); 0: it makes clips only."""
    picture_height: int = 0
    """Default height of those pictures."""

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of media that the model makes, its primary kind first."""
        return ("video", "image") if self.kind == "video" and self.picture_width else (self.kind,)

    @property
    def usual_pictures(self) -> int:
        """Pictures of the default request."""
        return max(self.min_pictures, int(self.needs_source))

    @property
    def takes_words_alone(self) -> bool:
        return not (self.usual_pictures or self.needs_video)

    @property
    def edits(self) -> bool:
        """True if the prompt edits the input picture; False without pictures, with noise strength, or for layers."""
        paints_over = self.takes_strength and not self.strength_needs_mask
        return self.max_pictures > 0 and not paints_over and not self.max_layers

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Pairs of input and output that the model supports, such as "text-to-video"."""
        names = ["control"] if self.takes_control else []
        for kind, own in ((kind, self.of(kind)) for kind in self.kinds):
            sources = {"text": own.takes_words_alone, "image": own.max_pictures > 0, "video": own.max_video_frames > 0}
            names += [f"{source}-to-{kind}" for source, is_taken in sources.items() if is_taken]
        return tuple(sorted(names, key="control".__eq__))

    def of(self, kind: MediaKind) -> Defaults:
        """Return the defaults for requests of ``kind``. A clip model makes single-frame pictures from prompts only.

        ValueError if the model does not make this kind.
        """
        if kind == self.kind:
            return self
        if kind not in self.kinds:
            raise ValueError(f"this model makes {self.kind}s, not {kind}s")
        size = {"width": self.picture_width, "height": self.picture_height, "picture_width": 0, "picture_height": 0}
        frame = {"num_frames": 1, "fps": 0, "frame_multiple": 1, "max_frames": 1, "min_frames": 1}
        words = {"max_pictures": 0, "min_pictures": 0, "takes_mask": False, "needs_mask": False, "masks_video": False}
        words |= {"max_video_frames": 0, "min_video_frames": 1, "needs_video": False, "keeps_length": False}
        words |= {"takes_both": False, "needs_source": False, "cuts_video": False, "max_reference_aspect": 0}
        words |= {"video_fps": 0, "takes_frame_indices": False, "video_needs_lora": False, "shaped_by_picture": False}
        whole: dict[str, Any] = {"takes_strength": False, "frames_per_chunk": 0, "first_chunk_steps": 1}
        whole |= {"make_sound": False, "chunk_overlap": 0, "stage_scale": 0.0, "max_videos": 1, "video_sound_rate": 0}
        changes: dict[str, Any] = {**size, **frame, **words, **whole}
        return replace(self, kind=kind, **changes)

    @property
    def enlarged(self) -> Defaults:
        """The defaults of requests with a second pass: the first one has the model's own size."""
        scale = Fraction(self.stage_scale).limit_denominator(100)
        sides = {name: round(getattr(self, name) * scale) for name in ("width", "height", "min_side")}
        return replace(self, **sides, size_multiple=self.size_multiple * scale.numerator)

    def has_second_stage(self, size: Size) -> bool:
        """Return whether results of two passes may have ``size``."""
        return self.stage_scale > 0 and size.num_frames != 1 and self.enlarged._size_limits.allows(size)

    def with_adapters(self, *, has_merged: bool, has_named: bool) -> Defaults:
        """Return the defaults of the model as it is served.

        A clip that is an adapter's context is taken beside adapters only: merged ones, or some that requests may name.
        """
        if not self.video_needs_lora or (has_named and not has_merged):
            return self
        if has_merged:
            return replace(self, video_needs_lora=False)
        return replace(self, max_video_frames=0, keeps_length=False, takes_both=False, video_needs_lora=False)

    def request(self, size: Size | None = None, **changes: Any) -> MediaRequest:
        """Return the default request with ``size``, ``changes`` (fields of ``MediaRequest``) and the required pictures.

        ValueError outside the model's limits.
        """
        size = size or Size(width=self.width, height=self.height)
        defaults: dict[str, Any] = {
            "request_id": "default",
            "model": "default",
            "prompt": "",
            "kind": self.kind,
            "width": size.width,
            "height": size.height,
            "num_frames": self.num_frames if size.num_frames is None else size.num_frames,
            "fps": self.fps,
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "true_cfg_scale": self.true_cfg_scale,
            "seed": 0,
            "num_pictures": self.usual_pictures,
            "has_mask": self.needs_mask,
            "has_control": self.takes_control,
            "num_video_frames": self._num_video_frames(size) if self.needs_video else 0,
            "num_layers": self.num_layers,
        }
        request = MediaRequest(**(defaults | changes))
        scale = self.guidance_beside(request.negative_prompt, request.true_cfg_scale)
        request = replace(request, true_cfg_scale=scale)
        self.check(request)
        return request

    def inputs(self, size: Size) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield possible inputs of a request of ``size``, in words and as fields of ``MediaRequest``.

        One picture and as many as are taken, beyond those that must come, and a clip.
        """
        for number in sorted({1, self.max_pictures} if self.max_pictures > self.min_pictures else ()):
            if number > self.usual_pictures:
                places = tuple(self.frame_multiple * place for place in range(number))
                indices = {"frame_indices": places} if self.takes_frame_indices else {}
                yield counted(number, *PICTURES), {"num_pictures": number, **indices}
        if self.max_video_frames and not self.needs_video:
            number = self._num_video_frames(size)
            yield f"a clip of {number} frames", {"num_video_frames": number}

    def guidance_beside(self, negative_prompt: str | None, true_cfg_scale: float) -> float:
        """Return the scale of classifier-free guidance that has an effect, as in the model's pipeline in diffusers."""
        return 1.0 if self.guides_beside_negative and negative_prompt is None else true_cfg_scale

    def check(self, request: MediaRequest) -> None:
        """Check all settings, including a picture of a model that makes clips and pictures."""
        for _, check in self.checks(request):
            check()

    def checks(self, request: MediaRequest) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield every check of the model, each with the field of ``MediaRequest`` that it is about."""
        if request.kind != self.kind:
            yield from self.of(request.kind).checks(request)
            return
        number, has_mask = request.num_pictures, request.has_mask
        yield "second_stage", partial(check_second_stage, request, self.stage_scale)
        own = self if request.second_stage is None else self.enlarged
        yield "width", partial(own.check_size, request.width, request.height)
        yield "num_frames", partial(self.check_num_frames, request.num_frames)
        yield "num_inference_steps", partial(self.check_num_steps, request.num_inference_steps)
        yield "num_pictures", partial(self.check_num_pictures, number, has_video=request.num_video_frames > 0)
        yield "frame_indices", partial(self.check_frame_indices, request)
        yield "has_mask", partial(self.check_mask, number, has_mask, has_video=request.num_video_frames > 0)
        yield "num_video_frames", partial(self._check_videos, request)
        yield "sound_samples", partial(self.check_kept_sound, request)
        yield "has_control", partial(self.check_control, request.has_control)
        has_scale, takes_control = self.control_scale > 0, self.takes_control
        yield "control_scale", partial(check_control_scale, request, has_scale=has_scale, takes_control=takes_control)
        yield "control_guidance_start", partial(self.check_control_guidance, request)
        yield "strength", partial(self.check_strength, request)
        yield "num_layers", partial(self.check_layers, request.num_layers)
        yield "cache", partial(self.check_cache, request)
        yield "sound", partial(check_sound, request, makes_sound=self.make_sound)
        yield "true_cfg_scale", partial(check_guidance, request.true_cfg_scale, is_taken=self.takes_guidance)
        yield from self.solver.checks(request.solver, request.true_cfg_scale)

    def check_size(self, width: int, height: int) -> None:
        self._size_limits.check(width, height)

    def nearest_size(self, width: float, height: float) -> Size:
        """Return a size of about this shape that passes ``check_size``."""
        return self._size_limits.nearest(width, height)

    @property
    def _size_limits(self) -> SizeLimits:
        """Limits of sizes. A clip is an MP4; the limits of picture formats are checked elsewhere."""
        return SizeLimits(
            multiple=self.size_multiple,
            max_pixels=self.max_pixels,
            min_side=self.min_side,
            max_side=MAX_SIDES["mp4"] if self.kind == "video" else math.inf,
        )

    def check_num_frames(self, num_frames: int) -> None:
        if num_frames > self.max_frames:
            largest = largest_num_frames(self.max_frames, self.frame_multiple)
            raise ValueError(f"num_frames is {num_frames}; it must be at most {largest}")
        if num_frames < self.min_frames:
            raise ValueError(f"num_frames is {num_frames}; it must be at least {self.min_frames}")
        check_frames(num_frames, self.frame_multiple, self.max_frames)

    def check_num_steps(self, num_steps: int) -> None:
        if not self.min_steps <= num_steps <= self.max_steps:
            few, many = self.min_steps, self.max_steps
            allowed = f"{many}" if few == many else f"from {few} to {many}"
            raise ValueError(f"num_inference_steps is {num_steps}; it must be {allowed}")

    def check_layers(self, num_layers: int) -> None:
        few, many = min(1, self.max_layers), self.max_layers
        if not few <= num_layers <= many:
            allowed = f"it must be from {few} to {many}" if few else "this model makes whole pictures: leave it out"
            raise ValueError(f"layers is {num_layers}; {allowed}")

    def check_cache(self, request: MediaRequest) -> None:
        if not self.takes_cache and request.cache != "off":
            raise ValueError(f"cache is {request.cache!r}; this model runs all steps of its pipeline: it must be off")
        in_rounds = self.frames_per_chunk > 0 and not self.chunk_overlap
        if request.cache != "off" and (in_rounds or self.num_chunks(request.num_frames) > 1):
            raise ValueError(f"cache is {request.cache!r}; this model makes clips in chunks, with which it must be off")
        computed_steps(request.cache, self.num_steps_of(request.stages[0]))

    def num_steps_of(self, request: MediaRequest) -> int:
        """Return the requested steps, times the number of chunks; with strength, only the last part of them.

        The arithmetic follows diffusers' image-to-image blocks, including their rounding.
        """
        if request.kind != self.kind:
            return self.of(request.kind).num_steps_of(request)
        if request.second_stage is not None:
            return sum(map(self.num_steps_of, request.stages))
        steps, strength = request.num_inference_steps, self.strength_of(request)
        if strength is not None:
            steps = int(steps * strength) if self.rounds_steps_down else steps - int(steps - steps * strength)
        order, extra = (1, 0) if request.solver.scheduler else (self.solver_order, self.extra_steps)
        whole = steps * order + extra if steps else 0
        return whole * (self.num_chunks(request.num_frames) - 1 + self.first_chunk_steps)

    def num_chunks(self, num_frames: int) -> int:
        """Return the chunks of a clip, each with all steps."""
        if not self.frames_per_chunk:
            return 1
        return max(1, -(-(num_frames - self.chunk_overlap) // (self.frames_per_chunk - self.chunk_overlap)))

    def strength_of(self, request: MediaRequest) -> float | None:
        """Return the share of its picture or clip that ``request`` repaints; None if it starts from noise."""
        if not self._may_have_strength(request):
            return None
        return self.strength if request.strength is None else request.strength

    def check_num_pictures(self, number: int, *, has_video: bool = False) -> None:
        if not self.min_pictures <= number <= self.max_pictures:
            raise ValueError(f"{counted(number, *SENT_PICTURES)} sent; this model takes {self._allowed_pictures()}")
        if self.needs_source and not (number or has_video):
            raise ValueError("this model needs a reference: send pictures as input_reference, or a clip as video")

    def check_frame_indices(self, request: MediaRequest) -> None:
        if self.takes_frame_indices:
            check_frame_indices(request, self.keyframes(request), self.frame_multiple)
        elif request.frame_indices:
            raise ValueError("this model takes no frame_indices: leave them out")

    def keyframes(self, request: MediaRequest) -> tuple[int, ...]:
        """Return the place of each input picture, counted in frames of latents: 0, then ``frame_multiple`` frames each.

        Without ``frame_indices`` they are the first and the last.
        """
        indices = request.frame_indices or (0, -1)[: request.num_pictures]
        frames = (one + request.num_frames if one < 0 else one for one in indices)
        return tuple(-(-frame // self.frame_multiple) for frame in frames)

    def check_mask(self, num_pictures: int, has_mask: bool, *, has_video: bool = False) -> None:
        takes_mask = self.masks_video if has_video else self.takes_mask and num_pictures > 0
        if has_mask and not takes_mask:
            sources = " or a ".join(("picture",) * self.takes_mask + ("clip",) * self.masks_video)
            allowed = f"a mask with a {sources} alone" if sources else "no mask"
            raise ValueError(f"this model takes {allowed}: leave it out, or take another model")
        if self.needs_mask and not has_mask:
            raise ValueError("this model needs a mask: send one with the picture")

    def check_video(self, num_video_frames: int, num_pictures: int = 0, num_frames: int | None = None) -> None:
        """Check a clip in frames at ``video_fps`` (0: none came); ``num_frames`` are the result's, if known."""
        if not num_video_frames:
            if self.needs_video:
                raise ValueError("this model needs an input clip: send one as video")
            return
        if not self.max_video_frames:
            raise ValueError("this model takes no input clip: leave video out, or take another model")
        if num_pictures and not self.takes_both:
            raise ValueError("this model takes a clip or pictures, not both: leave one out")
        self._check_video_length(num_video_frames)
        if num_frames == 1 < num_video_frames:
            raise ValueError("num_frames is 1, with an input clip; make it larger, or leave video out")

    def _check_video_length(self, num_video_frames: int) -> None:
        if not self.min_video_frames <= num_video_frames <= self.max_video_frames:
            allowed = f"from {self.min_video_frames} to {self.max_video_frames}"
            raise ValueError(f"video has {num_video_frames} frames at the clip's rate; this model takes {allowed}")

    def check_num_videos(self, number: int) -> None:
        if number > 1 and number > self.max_videos:
            raise ValueError(f"{number} input clips were sent; this model takes at most {self.max_videos}: send fewer")

    def _check_videos(self, request: MediaRequest) -> None:
        self.check_video(request.num_video_frames, request.num_pictures, request.num_frames)
        self.check_num_videos(1 + len(request.further_video_frames))
        for number in request.further_video_frames:
            self._check_video_length(number)

    @property
    def may_keep_audio(self) -> bool:
        """The sound of clips can be kept by requests that say nothing of the result's own sound."""
        return not self._keep_audio_fault(self.make_sound)

    def check_keep_audio(self, sound: bool | None = None) -> None:
        """Raise ValueError if the sound of clips cannot be kept. ``sound``: what the request says of the result's."""
        if fault := self._keep_audio_fault(self.make_sound if sound is None else sound):
            raise ValueError(fault)

    def _keep_audio_fault(self, makes_sound: bool) -> str:
        return keep_audio_fault(self.max_video_frames > 0, self.video_sound_rate > 0, makes_sound, self.keeps_length)

    def check_kept_sound(self, request: MediaRequest) -> None:
        if request.sound_samples:
            self.check_keep_audio(request.sound)
            check_sound_samples(request.sound_samples)

    def check_control(self, has_control: bool) -> None:
        if has_control and not self.takes_control:
            raise ValueError("this model takes no control picture: leave control_image out")
        if self.needs_control and not has_control:
            raise ValueError("this model needs a control picture: send one as control_image")

    def check_control_guidance(self, request: MediaRequest) -> None:
        check_control_guidance(request, is_taken=self.takes_control_guidance)

    def _num_video_frames(self, size: Size) -> int:
        """Return the frames of a clip for a request of ``size``."""
        num_frames = self.num_frames if size.num_frames is None else size.num_frames
        return num_frames if self.keeps_length or self.cuts_video else self.min_video_frames

    def check_strength(self, request: MediaRequest) -> None:
        if request.strength is not None and not self._may_have_strength(request):
            source = ("clip" if self.max_video_frames else "picture") + " and a mask" * self.strength_needs_mask
            allowed = f"strength with a {source} alone" if self.takes_strength else "no strength"
            raise ValueError(f"this model takes {allowed}: leave it out")
        if request.strength is not None and not 0 < request.strength <= 1:
            raise ValueError(f"strength is {request.strength}; it must be above 0 and at most 1")
        if self.num_steps_of(request) < 1:
            given, steps = self.strength_of(request), request.num_inference_steps
            raise ValueError(f"strength is {given}, which leaves none of {steps} steps; it must be at least 1/{steps}")

    def _may_have_strength(self, request: MediaRequest) -> bool:
        has_mask = request.has_mask or not self.strength_needs_mask
        return self.takes_strength and (request.num_pictures > 0 or request.num_video_frames > 0) and has_mask

    def _allowed_pictures(self) -> str:
        if self.max_pictures == 0:
            return "none: leave them out, or take another model"
        few, many = self.min_pictures, self.max_pictures
        return f"exactly {many}" if few == many else f"from {few} to {many}"
