"""A client's request, validated and independent of HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engines.core.model import Mix, normal_mix
from engines.core.spec import Attention
from pipelines.caching import CacheMode, computed_steps, control_changes
from pipelines.solver import AS_THE_MODEL, Solver, check_falling
from pipelines.wording import counted

if TYPE_CHECKING:
    from PIL.Image import Image


MediaKind = Literal["image", "video"]
ServiceTier = Literal["flex", "default", "priority"]
EnhancerOutcome = Literal["revised", "timeout", "unreachable", "refused", "invalid"]
"""Result of asking a prompt enhancer: a new prompt, or the reason why the prompt is used as it came."""
MetadataLevel = Literal["full", "seed", "none"]
"""Metadata in a file: all settings, model and seed only, or none."""


KEY_MARK = "+"
"""Separates an adapter's name from its folder. It sorts before all characters of names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """An adapter of the model, by name, with its scale."""

    name: str
    """Name by which requests and ``/v1/loras`` know it."""
    scale: float = 1.0
    """Factor on its weights; 1: as it was trained, 0: without effect."""
    folder: str = ""
    """Folder of an adapter that came at run time, whose last name no other one ever has; empty: configured."""
    part: str = ""
    """See ``LoraSource``, for an adapter that came at run time."""

    @property
    def key(self) -> str:
        """The name of its addition to the weights. It sorts like ``name``: sums have one order in every case."""
        return f"{self.name}{KEY_MARK}{self.folder.rpartition('/')[2]}" if self.folder else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondStage:
    """A second pass over a clip's latents, whose sides grow between the two passes."""

    scale: float
    """Factor of the sides."""
    sigmas: tuple[float, ...]
    """Noise levels of its steps, falling. The enlarged latents get noise of the first one."""
    loras: tuple[Lora, ...] = ()
    """Adapters of its steps, in place of those of the first pass."""


def mix_of(loras: Iterable[Lora]) -> Mix:
    """Return the additions of ``loras`` to the weights: equal for equal adapters in any order."""
    return normal_mix(tuple((lora.key, lora.scale) for lora in loras))


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRequest:
    """One picture or one clip."""

    request_id: str
    """Unique: one of the client's, with a random ending."""
    model: str
    """Name of the model in the application's configuration."""
    kind: MediaKind
    """Kind of the result: a picture or a clip."""
    prompt: str
    """The prompt that is encoded."""
    enhance_prompt: bool | None = None
    """A language model rewrites the prompt first; None: the model is served without one."""
    enhancer_outcome: EnhancerOutcome | None = None
    """None: no enhancer was asked."""
    given_prompt: str | None = None
    """The client's own prompt, if ``prompt`` is another."""
    negative_prompt: str | None = None
    """Prompt of the second branch; None: the pipeline's default, which may differ from the empty prompt."""
    width: int
    """Pixels of the result."""
    height: int
    """Pixels of the result."""
    num_frames: int = 1
    """Length of a clip; 1 for pictures."""
    fps: int = 0
    """Frames a second of a clip; 0 for pictures."""
    num_inference_steps: int
    """Steps of the solver, before ``strength`` leaves some out."""
    guidance_scale: float
    """Distilled scale, an input of guidance-distilled models."""
    true_cfg_scale: float
    """Above 1: a second branch with ``negative_prompt`` (Ho & Salimans 2022, arXiv:2207.12598)."""
    seed: int
    """Seed of the initial noise; equal requests with equal seeds have equal results."""
    preview_steps: tuple[int, ...] = ()
    """Steps (1 = after the first) whose latents become previews."""
    num_pictures: int = 0
    """Number of ``InputPictures``, which only the encoder receives."""
    frame_indices: tuple[int, ...] = ()
    """Frame of the clip for each input picture, from its end if negative; empty: the model's own places."""
    has_mask: bool = False
    """A mask comes with the input pictures, or with the clip."""
    num_video_frames: int = 0
    """Frames of the ``InputVideo``, which only the encoder receives; 0: none."""
    further_video_frames: tuple[int, ...] = ()
    """Frames of each further clip, in the client's order."""
    sound_samples: tuple[int, ...] = ()
    """Samples a channel of each clip's sound, 0 without one; empty: the request keeps no sound of clips."""
    copies_sound: bool = False
    """The result gets the sound of its clip, which the model does not hear."""
    has_control: bool = False
    """It has a control picture, such as edges or depths."""
    control_scale: float | None = None
    """Weight of the control; None: the model's default."""
    control_guidance_start: float | None = None
    """Share of the steps before the control begins; None: the model's default."""
    control_guidance_end: float | None = None
    """Share of the steps after which the control ends; None: the model's default."""
    source_clip_id: str | None = None
    """Id of the input clip, if this server made it."""
    strength: float | None = None
    """Share of the picture to repaint, in (0, 1]; None: the model's default."""
    num_layers: int = 0
    """Layers with opacity, from lowest to highest; 0: one opaque picture."""
    loras: tuple[Lora, ...] = ()
    """Adapters for this request, among those served with the model."""
    cache: CacheMode = "off"
    """Pattern of steps that reuse the previous prediction (``pipelines.caching``)."""
    attention: Attention | None = None
    """Precision of attention; None: the gang's own."""
    solver: Solver = AS_THE_MODEL
    """Scheduler and schedule."""
    second_stage: SecondStage | None = None
    """A second pass, which has the size of the request; all other settings of steps are those of the first."""
    sound: bool | None = None
    """True if the clip has sound; None: the model's default."""
    service_tier: ServiceTier = "default"
    """Urgency: "flex" yields to others, "priority" goes before them."""
    deadline_s: float | None = None
    """Seconds from arrival that the client waits; None: no limit."""
    waited_s: float = 0.0
    """Seconds since arrival when the request is passed on."""
    key: str = ""
    """Hash of the API key; empty without keys."""
    weight: float = 1.0
    """The key's share of a gang."""

    @property
    def stages(self) -> tuple[MediaRequest, ...]:
        """A request for each pass over the latents: itself alone, or a smaller one and one in its size.

        The second pass has no guidance, and a schedule without a shift.
        """
        second = self.second_stage
        if second is None:
            return (self,)
        width, height = (round(side / second.scale) for side in (self.width, self.height))
        last = replace(
            self,
            second_stage=None,
            num_inference_steps=len(second.sigmas),
            solver=Solver(flow_shift=1.0, sigmas=second.sigmas),
            true_cfg_scale=1.0,
            loras=second.loras,
            cache="off",
        )
        return replace(self, second_stage=None, width=width, height=height), last

    @property
    def all_loras(self) -> tuple[Lora, ...]:
        """The adapters of all its steps."""
        second = () if self.second_stage is None else self.second_stage.loras
        return tuple(dict.fromkeys((*self.loras, *second)))

    def computed_steps(self, num_steps: int) -> tuple[bool, ...]:
        """Return, for each of the ``num_steps`` of this request, whether it makes forwards.

        A step where the control network begins or ends makes them: predictions with and without it differ.
        """
        begin, end = self.control_guidance_start, self.control_guidance_end
        changes = set(control_changes(begin, end, num_steps)) if self.has_control else set()
        computed = computed_steps(self.cache, num_steps)
        return tuple(is_computed or step in changes for step, is_computed in enumerate(computed))

    @property
    def revised_prompt(self) -> str | None:
        """The rewritten prompt, if there is one."""
        return None if self.given_prompt is None else self.prompt


def check_second_stage(request: MediaRequest, scale: float) -> None:
    """Raise ValueError if ``scale``, the model's factor between two passes, does not allow those of ``request``."""
    second = request.second_stage
    if second is None:
        return
    if not scale:
        raise ValueError(
            "second_stage_sigmas need a model with a latent upsampler, and this one has none: leave them out"
        )
    if scale != second.scale:
        raise ValueError(f"the sides grow by {second.scale:g} between both passes; this model's factor is {scale:g}")
    check_falling("second_stage_sigmas", second.sigmas, 1.0)
    if request.num_video_frames:
        raise ValueError("second_stage_sigmas are not for requests with an input clip: leave them or video out")
    if request.num_frames == 1:
        raise ValueError("num_frames is 1, and a second pass is for clips: make it larger, or leave that out")


def check_sound(request: MediaRequest, *, makes_sound: bool) -> None:
    """Raise ValueError if ``request`` asks for a sound that its result cannot have."""
    if request.sound and not makes_sound:
        raise ValueError("generate_sound is true; this model makes no sound: leave it out")
    if request.sound and request.num_frames == 1:
        raise ValueError("generate_sound is true, and num_frames is 1; a picture has no sound: leave one of both out")


def check_sound_samples(sound_samples: tuple[int, ...]) -> None:
    """Raise ValueError if all clips of a request that keeps their sound have none."""
    if not any(sound_samples):
        raise ValueError("keep_audio is true, and no input clip has a sound: leave it out, or send one")


def keep_audio_fault(takes_clips: bool, hears_clips: bool, makes_sound: bool, keeps_length: bool) -> str:
    """Return why a model can neither hear the sound of a clip nor copy it into the result; empty if it can."""
    if hears_clips:
        return ""
    if not takes_clips:
        return "keep_audio is true; this model takes no clip whose sound it could keep: leave it out"
    if makes_sound:
        return "keep_audio is true; this model makes a sound of its own, and hears none: leave it out"
    if keeps_length:
        return ""
    beside = "the result of this model does not run beside the clip, and it hears none"
    return f"keep_audio is true; {beside}: leave it out"


def check_frame_indices(request: MediaRequest, places: tuple[int, ...], frame_multiple: int) -> None:
    """Raise ValueError unless the input pictures have different ``places``, one for ``frame_multiple`` frames each."""
    indices, number = request.frame_indices, request.num_pictures
    if not indices and number > 2:
        raise ValueError(f"{number} input pictures were sent: say in frame_indices to which frames they belong")
    if indices and len(indices) != number:
        pictures = counted(number, "input picture", "input pictures")
        raise ValueError(f"frame_indices has {len(indices)} numbers for {pictures}: give one for each")
    if wrong := [one for one in indices if not -request.num_frames <= one < request.num_frames]:
        allowed = f"from 0 to {request.num_frames - 1}, or from -{request.num_frames} to -1, counted from the end"
        raise ValueError(f"frame_indices has {wrong[0]}; it must be {allowed}")
    if len(set(places)) < number:
        raise ValueError(
            f"two pictures belong to one place of the clip: frame 0 is one, then each {frame_multiple} frames "
            "are; give frame_indices further apart, a longer clip, or fewer pictures"
        )


def check_control_scale(request: MediaRequest, *, has_scale: bool, takes_control: bool) -> None:
    """Raise ValueError if ``request`` has a weight of a control that its model does not have, or no control for it."""
    given = f"control_scale is {request.control_scale:g}" if request.control_scale is not None else ""
    if given and not has_scale:
        allowed = "this model has none to set" if takes_control else "this model takes no control picture"
        raise ValueError(f"{given}; {allowed}: leave it out")
    if given and takes_control and not request.has_control:
        raise ValueError(f"{given}, without a control picture: send one as control_image, or leave it out")


def check_control_guidance(request: MediaRequest, *, is_taken: bool) -> None:
    """Raise ValueError if ``request`` has shares of the steps for a control that are wrong, or not ``is_taken``."""
    start, end = request.control_guidance_start, request.control_guidance_end
    if (start, end) == (None, None):
        return
    if not is_taken:
        raise ValueError("control_guidance_start and control_guidance_end are not for this model; leave them out")
    if not request.has_control:
        raise ValueError(
            "control_guidance_start and control_guidance_end need a control picture: send one as control_image, or "
            "leave them out"
        )
    start, end = start or 0.0, 1.0 if end is None else end
    if not 0 <= start < end <= 1:
        allowed = "it must be from 0 to 1 and below control_guidance_end"
        raise ValueError(f"control_guidance_start is {start:g} and control_guidance_end {end:g}; {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKind:
    """All of a request that decides how long one of its steps takes. Steps of equal kinds take equally long."""

    size: str
    """Width, height and frames or layers of the result; "silent" where sound was turned off."""
    num_branches: int
    """Forwards of a step: 2 with classifier-free guidance, else 1."""
    settings: str
    """Experts' guidance, clip and attention of the request; empty in most requests."""
    inputs: str
    """Number of input pictures, control, and adapters by name; empty in most requests."""

    @classmethod
    def of(cls, request: MediaRequest) -> StepKind:
        experts = (request.solver.guidance_scale_2, request.solver.boundary_ratio)
        numbers = ",".join("-" if one is None else f"{one:g}" for one in experts)
        given = (
            f"experts={numbers}" if any(one is not None for one in experts) else "",
            _clip_kind(request),
            request.attention or "",
            "" if request.second_stage is None else f"second={len(request.second_stage.sigmas)}",
        )
        inputs = (
            f"pictures={request.num_pictures}" if request.num_pictures else "",
            "control" if request.has_control else "",
            *sorted({lora.name for lora in request.all_loras}),
        )
        silence = " silent" if request.sound is False else ""
        return cls(
            size=f"{request.width}x{request.height}x{request.num_layers or request.num_frames}{silence}",
            num_branches=2 if request.true_cfg_scale > 1 else 1,
            settings="".join(f" {one}" for one in given if one),
            inputs="".join(f" {one}" for one in inputs if one),
        )


def _clip_kind(request: MediaRequest) -> str:
    """Return the length of the input clip as text; "clip" if it is that of the result."""
    number, further = request.num_video_frames, "".join(f"+{one}" for one in request.further_video_frames)
    sounds = ",sound" if any(request.sound_samples) and not request.copies_sound else ""
    first = f"clip={number}" if number not in (0, request.num_frames) else "clip" * bool(number)
    return f"{first}{further}{sounds}"


Mode = Literal["RGB", "RGBA", "L"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPicture:
    """A validated, decoded picture, upright and without metadata."""

    width: int
    """Pixels of a row."""
    height: int
    """Number of rows."""
    mode: Mode
    """Channels of a pixel, as in Pillow."""
    data: bytes
    """Rows of 8-bit pixels of ``mode``."""

    @classmethod
    def of(cls, image: Image) -> InputPicture:
        """Convert a Pillow image. ValueError for modes other than ``Mode``."""
        if image.mode not in ("RGB", "RGBA", "L"):
            raise ValueError(f"a picture of mode {image.mode}; known: RGB, RGBA, L")
        mode: Mode = image.mode  # type: ignore[assignment]  # checked above
        return cls(width=image.width, height=image.height, mode=mode, data=image.tobytes())

    def image(self) -> Image:
        from PIL import Image

        return Image.frombytes(self.mode, (self.width, self.height), self.data)

    def on_white(self) -> Image:
        """Return the picture in RGB, blended onto white: colours under transparency are arbitrary, often black."""
        return self.over("white")

    def over(self, colour: str) -> Image:
        """Return the picture in RGB, blended onto a colour that Pillow knows by name or as ``#rrggbb``."""
        from PIL import Image

        image = self.image()
        if self.mode != "RGBA":
            return image.convert("RGB")
        ground = Image.new("RGBA", image.size, colour)
        return Image.alpha_composite(ground, image).convert("RGB")

    def cut_to(self, width: int, height: int) -> InputPicture:
        """See ``InputPictures.cut_to``."""
        from PIL import Image, ImageOps

        colours = self.on_white()
        return self.of(ImageOps.fit(colours, (width, height), Image.Resampling.LANCZOS))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSound:
    """The validated, decoded sound of a clip. It begins with the clip and ends no later."""

    num_channels: int
    """1 or 2."""
    rate: int
    """Samples a second: the model's, or ``COPIED_RATE``."""
    data: bytes
    """Finite 32-bit float samples, one channel after another; full scale is 1, which loud sounds may exceed."""

    @property
    def num_samples(self) -> int:
        """Samples a channel."""
        return len(self.data) // 4 // self.num_channels


COPIED_RATE = 48_000
"""Samples a second of a sound that becomes that of the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputVideo:
    """A validated, decoded clip: upright RGB frames at a constant rate, in the size of the request."""

    width: int
    """Pixels of a row."""
    height: int
    """Rows of a frame."""
    num_frames: int
    """Number of frames."""
    fps: int
    """Rate of the request, unless the model takes clips at its own (``Defaults.video_fps``)."""
    data: bytes
    """8-bit RGB pixels of all frames, one after another."""
    sound: InputSound | None = None
    """Its sound, if the request keeps it and the file has one."""

    def frames(self) -> list[Image]:
        from PIL import Image

        each = len(self.data) // self.num_frames
        parts = (self.data[number * each : (number + 1) * each] for number in range(self.num_frames))
        return [Image.frombytes("RGB", (self.width, self.height), part) for part in parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPictures:
    """Pictures and clip of one request."""

    pictures: tuple[InputPicture, ...] = ()
    """Input pictures in the client's order, without mask and control."""
    mask: InputPicture | None = None
    """Mode "L", white where to paint."""
    video: InputVideo | None = None
    """Input clip; None: there is none."""
    further_videos: tuple[InputVideo, ...] = ()
    """Clips after the first, in the client's order."""
    video_mask: InputVideo | None = None
    """Mask with the frames and size of the clip, white where the clip is made anew."""
    control: InputPicture | None = None
    """Edges, depths or poses that the result follows."""

    @property
    def videos(self) -> tuple[InputVideo, ...]:
        """All clips, in the client's order."""
        return () if self.video is None else (self.video, *self.further_videos)

    @property
    def num_bytes(self) -> int:
        """Memory of all pixels and samples."""
        sounds = (one.sound for one in self.videos)
        others = (self.mask, *self.videos, *sounds, self.video_mask, self.control)
        return sum(len(one.data) for one in (*self.pictures, *others) if one is not None)

    def over(self, colour: str) -> InputPictures:
        """Return the pictures with ``colour`` in place of their transparency."""

        def opaque(picture: InputPicture) -> InputPicture:
            return InputPicture.of(picture.over(colour)) if picture.mode == "RGBA" else picture

        control = None if self.control is None else opaque(self.control)
        return replace(self, pictures=tuple(map(opaque, self.pictures)), control=control)

    def cut_to(self, width: int, height: int) -> InputPictures:
        """Return the pictures in RGB and of that size: scaled to cover it, then cropped around the centre."""
        return replace(self, pictures=tuple(picture.cut_to(width, height) for picture in self.pictures))


NO_PICTURES = InputPictures()
